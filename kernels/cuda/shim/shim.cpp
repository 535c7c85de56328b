// Runs the kernels on a CPU: threads of a block as fibers, see `cuda_on_cpu.h`. All kernels are in this one unit.
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "cuda_on_cpu.h"

#include "../add.cu"
#include "../append.cu"
#include "../attention.cu"
#include "../cells.cu"
#include "../codec.cu"
#include "../dequantise.cu"
#include "../gather_rows.cu"
#include "../geglu.cu"
#include "../gemm.cu"
#include "../gemv.cu"
#include "../norm.cu"
#include "../relocate.cu"
#include "../rope.cu"
#include "../scale.cu"
#include "../swiglu.cu"

thread_local Index threadIdx, blockIdx, blockDim;

namespace shim {
namespace {

const size_t STACK_BYTES = 128 << 10;
// What a GPU gives a block without being asked for more.
const size_t SHARED_BYTES = 48 << 10;

enum class State { ready, waits_for_block, waits_for_warp, ended };

// Begun by a context, which takes calls of the system; from then on it is left and entered by jumps, which do not. At the
// end of a block it stays in `enter` for the next one.
struct Fiber {
    ucontext_t context;
    jmp_buf here;
    bool begun = false;
    char* stack = nullptr;
    State state = State::ended;
    u32 exchanges = 0;

    ~Fiber() { free(stack); }
};

// A block being run. One for each thread of the host.
struct Block {
    std::vector<Fiber> fibers;
    jmp_buf scheduler;
    u32 count = 0, current = 0;
    void (*kernel)(void**) = nullptr;
    void** args = nullptr;
    // Values that lanes exchange: a second set, so that a fast lane may be one exchange ahead.
    std::vector<float> exchanged[2];
    alignas(16) u8 shared[4 * SHARED_BYTES];
    size_t shared_used = 0;
    std::vector<std::pair<const void*, size_t>> shared_parts;
    char problem[160] = "";

    void give_way(State state) {
        fibers[current].state = state;
        if (_setjmp(fibers[current].here) == 0) {
            _longjmp(scheduler, 1);
        }
    }

    void go_on(u32 place);
};

thread_local Block* block = nullptr;

void enter() {
    for (;;) {
        block->kernel(block->args);
        block->give_way(State::ended);
    }
}

void Block::go_on(u32 place) {
    current = place;
    threadIdx = {place, 0, 0};
    if (_setjmp(scheduler) != 0) {
        return;
    }
    Fiber& fiber = fibers[place];
    if (fiber.begun) {
        _longjmp(fiber.here, 1);
    }
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    setcontext(&fiber.context);
}

// A permutation of `count`: 0 forward, 1 backward, others at random.
std::vector<u32> order_of(u32 count, u32 order) {
    std::vector<u32> places(count);
    u64 random = order;
    for (u32 i = 0; i < count; i++) {
        places[i] = order == 1 ? count - 1 - i : i;
        if (order > 1) {
            random = random * 6364136223846793005ull + 1442695040888963407ull;
            std::swap(places[i], places[(random >> 33) % (i + 1)]);
        }
    }
    return places;
}

// Wakes warps whose lanes have all come; whether there was one.
bool wake_warps() {
    bool woken = false;
    for (u32 first = 0; first + 32 <= block->count; first += 32) {
        bool all = true;
        for (u32 i = first; i < first + 32; i++) {
            all = all && block->fibers[i].state == State::waits_for_warp;
        }
        for (u32 i = first; all && i < first + 32; i++) {
            block->fibers[i].state = State::ready;
        }
        woken = woken || all;
    }
    return woken;
}

// Runs one block to its end; whether it got there.
bool run_block(const std::vector<u32>& order) {
    for (u32 i = 0; i < block->count; i++) {
        block->fibers[i].state = State::ready;
        block->fibers[i].exchanges = 0;
    }
    for (;;) {
        for (u32 place : order) {
            if (block->fibers[place].state == State::ready) {
                block->go_on(place);
            }
        }
        u32 ended = 0, waiting = 0;
        for (u32 i = 0; i < block->count; i++) {
            ended += block->fibers[i].state == State::ended;
            waiting += block->fibers[i].state == State::waits_for_block;
        }
        if (ended == block->count) {
            return block->problem[0] == 0;
        }
        if (waiting == block->count) {
            for (u32 i = 0; i < block->count; i++) {
                block->fibers[i].state = State::ready;
            }
        } else if (!wake_warps()) {
            snprintf(block->problem, sizeof block->problem,
                     "threads wait for others that never come: %u ended, %u wait for the block, %u for their warp", ended,
                     waiting, block->count - ended - waiting);
            // They are in the middle of the kernel: the next block begins with new ones.
            for (Fiber& fiber : block->fibers) {
                fiber.begun = false;
            }
            return false;
        }
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(A*)args[I]...);
}

// What kind of argument a type is: p for a pointer, u for u32, l for u64, f for float.
template <class A>
struct Kind {};
template <class T>
struct Kind<T*> {
    static const char VALUE = 'p';
};
template <>
struct Kind<u32> {
    static const char VALUE = 'u';
};
template <>
struct Kind<u64> {
    static const char VALUE = 'l';
};
template <>
struct Kind<float> {
    static const char VALUE = 'f';
};

template <class F>
struct Arguments;
template <class... A>
struct Arguments<void (*)(A...)> {
    template <void (*kernel)(A...)>
    static void run(void** args) {
        call(kernel, args, std::index_sequence_for<A...>());
    }
    static const char* kinds() {
        static const char KINDS[] = {Kind<A>::VALUE..., 0};
        return KINDS;
    }
};

struct Entry {
    const char* name;
    void (*run)(void**);
    const char* (*kinds)();
};

#define ENTRY(name) {#name, Arguments<decltype(&name)>::run<name>, Arguments<decltype(&name)>::kinds},
#define OF_FORMAT(Format, name, block) \
    ENTRY(embed_##name) ENTRY(dequantise_##name) ENTRY(gemv_1_##name) ENTRY(gemv_4_##name) ENTRY(gemm_##name)
#define OF_KV(Kv, name)                                                                              \
    ENTRY(append_##name) ENTRY(gather_cell_##name) ENTRY(scatter_cell_##name) ENTRY(attention_decode_##name) \
    ENTRY(attention_prefill_##name)

#define OF_CODEC(Codec, name) ENTRY(pack_cell_##name) ENTRY(unpack_cell_##name)

const Entry ENTRIES[] = {
    ENTRY(add) ENTRY(attention_merge) ENTRY(gather_rows) ENTRY(geglu) ENTRY(head_norm) ENTRY(relocate_f16)
    ENTRY(relocate_f32) ENTRY(rms_norm) ENTRY(rope) ENTRY(scale) ENTRY(scale_channels) ENTRY(swiglu) FOR_EACH_FORMAT(OF_FORMAT) FOR_EACH_KV(OF_KV)
    FOR_EACH_CODEC(OF_CODEC)
};

}  // namespace

void* block_memory(const void* key, size_t bytes) {
    for (auto& part : block->shared_parts) {
        if (part.first == key) {
            return block->shared + part.second;
        }
    }
    size_t at = block->shared_used;
    block->shared_parts.push_back({key, at});
    block->shared_used += (bytes + 15) / 16 * 16;
    if (block->shared_used > SHARED_BYTES) {
        snprintf(block->problem, sizeof block->problem, "%zu bytes of shared memory; at most %zu", block->shared_used,
                 SHARED_BYTES);
    }
    if (block->shared_used > sizeof block->shared) {
        abort();
    }
    return block->shared + at;
}

void wait_for_block() {
    block->give_way(State::waits_for_block);
}

float exchange(float value, int mask) {
    u32 set = block->fibers[block->current].exchanges++ % 2, own = block->current;
    block->exchanged[set][own] = value;
    block->give_way(State::waits_for_warp);
    return block->exchanged[set][own ^ mask];
}

}  // namespace shim

// Runs a kernel over a grid of blocks of `threads` threads. `args` points to each argument, `kinds` has a letter for each
// (see `Kind`) or is null. `order` says in which order threads and blocks run. 0, or what is wrong in `problem` (of `size` bytes).
extern "C" int shim_launch(const char* name, const u32* grid, u32 threads, void** args, const char* kinds, u32 order,
                           char* problem, size_t size) {
    using namespace shim;
    const Entry* found = nullptr;
    for (const Entry& entry : ENTRIES) {
        if (!strcmp(entry.name, name)) {
            found = &entry;
        }
    }
    if (!found) {
        snprintf(problem, size, "there is no kernel %s", name);
        return 1;
    }
    if (kinds && strcmp(found->kinds(), kinds)) {
        snprintf(problem, size, "%s takes arguments %s and is given %s", name, found->kinds(), kinds);
        return 1;
    }
    static thread_local Block own;
    block = &own;
    if (own.fibers.size() < threads) {
        // Nothing runs now, so nothing points to the fibers that go.
        own.fibers = std::vector<Fiber>(threads);
        for (Fiber& fiber : own.fibers) {
            fiber.stack = (char*)malloc(STACK_BYTES);
        }
    }
    own.count = threads, own.kernel = found->run, own.args = args, own.problem[0] = 0;
    own.exchanged[0].assign(threads, 0), own.exchanged[1].assign(threads, 0);
    blockDim = {threads, 1, 1};
    const std::vector<u32> blocks = order_of(grid[0] * grid[1] * grid[2], order), places = order_of(threads, order);
    for (u32 index : blocks) {
        blockIdx = {index % grid[0], index / grid[0] % grid[1], index / grid[0] / grid[1]};
        own.shared_used = 0, own.shared_parts.clear();
        memset(own.shared, 0xff, sizeof own.shared);
        if (!run_block(places)) {
            snprintf(problem, size, "%s, block (%u, %u, %u): %s", name, blockIdx.x, blockIdx.y, blockIdx.z, own.problem);
            return 1;
        }
    }
    return 0;
}

// The name of kernel `index`, or null behind the last one.
extern "C" const char* shim_kernel(u32 index) {
    using namespace shim;
    return index < sizeof ENTRIES / sizeof *ENTRIES ? ENTRIES[index].name : nullptr;
}
