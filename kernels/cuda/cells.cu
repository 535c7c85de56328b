// `gather_cell_TYPE`: pages to cell; `scatter_cell_TYPE`: cell to pages. One launch moves all pages of a cell, wherever
// they are in the pool.
//
// A cell has for each KV head K of `tokens` tokens as `[tokens][head_dim]` in the type of the pool, then V; where they
// have scales, those of K follow as `[tokens][blocks]` f32, then those of V. `tables` has `table_pages` page ids for each
// head. A block moves one page of one head; neighbouring threads take neighbouring channels of a token.
//
// Roofline: memory, a byte read and a byte written for each byte of the cell. K is turned round on the way: its side in
// the page is touched with a stride, but a block reads the whole page, so the cache makes whole lines of it.
#include "pages.cuh"

#define CELL_THREADS 128u

template <class Stored>
DEVICE void move(bool gather, Stored& in_page, Stored& in_cell) {
    if (gather) {
        in_cell = in_page;
    } else {
        in_page = in_cell;
    }
}

template <class Kv>
DEVICE void move_page(bool gather, typename Kv::Stored* pages, float* scales, u32 head_dim, const u32* tables,
                      u32 table_pages, u32 tokens, u8* cell) {
    typedef typename Kv::Stored Stored;
    const u32 index = blockIdx.x, head = blockIdx.y, blocks = scales_of<Kv>(head_dim);
    const PageAt<Stored> page(pages, scales, tables[(u64)head * table_pages + index], head_dim, blocks);
    const u64 values = (u64)tokens * head_dim * sizeof(Stored), of_scales = (u64)tokens * blocks * sizeof(float);
    u8* part = cell + head * 2 * (values + of_scales);
    const u32 first = index * PAGE, slots = tokens - first < PAGE ? tokens - first : PAGE;
    Stored* keys = (Stored*)part + (u64)first * head_dim;
    Stored* others = (Stored*)(part + values) + (u64)first * head_dim;
    for (u32 i = threadIdx.x; i < slots * head_dim; i += CELL_THREADS) {
        move(gather, page.key(i / head_dim, i % head_dim), keys[i]);
        move(gather, page.value(i / head_dim, i % head_dim), others[i]);
    }
    float* key_scales = (float*)(part + 2 * values) + (u64)first * blocks;
    float* value_scales = (float*)(part + 2 * values + of_scales) + (u64)first * blocks;
    for (u32 i = threadIdx.x; i < slots * blocks; i += CELL_THREADS) {
        move(gather, page.key_scale(i / blocks, i % blocks), key_scales[i]);
        move(gather, page.value_scale(i / blocks, i % blocks), value_scales[i]);
    }
}

#define CELLS(Kv, name)                                                                                       \
    KERNEL(gather_cell_##name)(Kv::Stored* pages, float* scales, u32 head_dim, const u32* tables,             \
                               u32 table_pages, u32 tokens, u8* cell) {                                       \
        move_page<Kv>(true, pages, scales, head_dim, tables, table_pages, tokens, cell);                      \
    }                                                                                                         \
    KERNEL(scatter_cell_##name)(Kv::Stored* pages, float* scales, u32 head_dim, const u32* tables,            \
                                u32 table_pages, u32 tokens, u8* cell) {                                      \
        move_page<Kv>(false, pages, scales, head_dim, tables, table_pages, tokens, cell);                     \
    }
FOR_EACH_KV(CELLS)
