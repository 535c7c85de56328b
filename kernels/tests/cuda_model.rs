//! A small model, layer by layer as the engine computes it, on the CUDA backend through the shim: near the CPU's logits,
//! and with the same bits after its KV left the device and came back, or was computed in other pieces. With
//! `SESSION_RUNTIME_TEST_DEVICE=cuda` this and the tests of kernels and attention run on a GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;
mod shim;

use kernels::backend::{
    AttentionShape, Backend, KvType, MatrixSpec, Output, PAGE_TOKENS, PageId, PoolSpec, RopePairing, RowGroup,
};
use kernels::cpu::{CpuBackend, CpuOptions, Rounding};
use kernels::formats::TensorType;
use sample::{Random, bits, floats, weights};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const WIDTH: usize = HEADS * DIM;
const INNER: usize = 256;
const VOCABULARY: usize = 96;
const LAYERS: usize = 2;
const EPS: f32 = 1e-5;
const SHAPE: AttentionShape =
    AttentionShape { heads: HEADS, kv_heads: KV_HEADS, head_dim: DIM, scale: 0.125, window: None };

struct Layer<B: Backend> {
    norms: [B::Vector; 2],
    qkv: [(B::Matrix, B::Vector); 3],
    out: B::Matrix,
    gate: B::Matrix,
    up: B::Matrix,
    down: B::Matrix,
}

struct Model<B: Backend> {
    table: B::Matrix,
    layers: Vec<Layer<B>>,
    norm: B::Vector,
    rope: B::Rope,
}

impl<B: Backend> Model<B> {
    /// The same random weights for every backend; each matrix in another format.
    fn new(backend: &B) -> Self {
        let mut random = Random::new(77);
        let mut formats =
            [TensorType::Q4_K, TensorType::Q6_K, TensorType::Q8_0, TensorType::BF16].into_iter().cycle();
        let mut matrix = |random: &mut Random, rows: usize, cols: usize| {
            let format = formats.next().unwrap();
            let spec = MatrixSpec { name: "w".to_string(), format, rows, cols };
            backend.load_matrix(&spec, &weights(random, format, rows, cols)).unwrap()
        };
        let vector = |random: &mut Random, len: usize, middle: f32| {
            let values: Vec<f32> = floats(random, len, 0.2).iter().map(|v| v + middle).collect();
            backend.load_vector("v", &values).unwrap()
        };
        let random = &mut random;
        let table = matrix(random, VOCABULARY, WIDTH);
        let layers = (0..LAYERS)
            .map(|_| Layer {
                norms: [vector(random, WIDTH, 1.0), vector(random, WIDTH, 1.0)],
                qkv: [HEADS, KV_HEADS, KV_HEADS]
                    .map(|heads| (matrix(random, heads * DIM, WIDTH), vector(random, heads * DIM, 0.0))),
                out: matrix(random, WIDTH, WIDTH),
                gate: matrix(random, INNER, WIDTH),
                up: matrix(random, INNER, WIDTH),
                down: matrix(random, WIDTH, INNER),
            })
            .collect();
        let rope = backend.rope_table(10_000.0, DIM, 512).unwrap();
        Self { table, layers, norm: vector(random, WIDTH, 1.0), rope }
    }

    /// Logits of `ids` as tokens `start..` of a sequence whose pages are `tables`, `[layer][head]`.
    fn step(&self, backend: &B, pool: &mut B::Pool, tables: &Tables, ids: &[u32], start: usize) -> Vec<f32> {
        let rows = ids.len();
        let tensor = |cols: usize| backend.tensor(rows, cols).unwrap();
        let (mut x, mut y, mut attended) = (tensor(WIDTH), tensor(WIDTH), tensor(WIDTH));
        let (mut q, mut k, mut v) = (tensor(WIDTH), tensor(KV_HEADS * DIM), tensor(KV_HEADS * DIM));
        let (mut gate, mut up) = (tensor(INNER), tensor(INNER));
        let positions: Vec<u32> = (start as u32..).take(rows).collect();
        backend.embed(&self.table, ids, &mut x).unwrap();
        for (layer, tables) in self.layers.iter().zip(&tables.0) {
            let tables: Vec<&[PageId]> = tables.iter().map(Vec::as_slice).collect();
            let group = [RowGroup { tables: &tables, first_row: 0, rows, start }];
            backend.rms_norm(&x, &layer.norms[0], EPS, &mut y, rows).unwrap();
            let mut products = layer
                .qkv
                .iter()
                .zip([&mut q, &mut k, &mut v])
                .map(|((weights, bias), out)| Output { weights, bias: Some(bias), out })
                .collect::<Vec<_>>();
            backend.linears(&mut products, &y, rows).unwrap();
            backend.rope(&mut q, HEADS, DIM, &self.rope, RopePairing::Halves, &positions).unwrap();
            backend.rope(&mut k, KV_HEADS, DIM, &self.rope, RopePairing::Halves, &positions).unwrap();
            backend.append(pool, SHAPE, &group, &k, &v).unwrap();
            backend.attention(pool, SHAPE, &group, &q, &mut attended, None).unwrap();
            backend.linear(&layer.out, None, &attended, &mut y, rows).unwrap();
            backend.add(&mut x, &y, rows).unwrap();
            backend.rms_norm(&x, &layer.norms[1], EPS, &mut y, rows).unwrap();
            backend.linear(&layer.gate, None, &y, &mut gate, rows).unwrap();
            backend.linear(&layer.up, None, &y, &mut up, rows).unwrap();
            backend.swiglu(&mut gate, &up, rows).unwrap();
            backend.linear(&layer.down, None, &gate, &mut y, rows).unwrap();
            backend.add(&mut x, &y, rows).unwrap();
        }
        backend.rms_norm(&x, &self.norm, EPS, &mut y, rows).unwrap();
        let mut logits = tensor(VOCABULARY);
        backend.linear(&self.table, None, &y, &mut logits, rows).unwrap();
        let mut values = vec![0.0; rows * VOCABULARY];
        backend.read(&logits, rows, &mut values).unwrap();
        values
    }
}

/// Page ids by layer, head and place.
struct Tables(Vec<Vec<Vec<PageId>>>);

const TOKENS: usize = 44;
const PAGES: usize = LAYERS * KV_HEADS * TOKENS.div_ceil(PAGE_TOKENS);

impl Tables {
    /// Every page of the pool, beginning at `first` and going on in steps of `step`.
    fn new(first: usize, step: usize) -> Self {
        let mut pages = (0..).map(|i| PageId(((first + i * step) % PAGES) as u32));
        let mut head = || pages.by_ref().take(TOKENS.div_ceil(PAGE_TOKENS)).collect();
        Self((0..LAYERS).map(|_| (0..KV_HEADS).map(|_| head()).collect()).collect())
    }
}

fn spec(kv_type: KvType) -> PoolSpec {
    PoolSpec { pages: PAGES, head_dim: DIM, kv_type }
}

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| i * 29 % VOCABULARY as u32).collect()
}

/// Logits of all tokens, in pieces of these sizes.
fn run<B: Backend>(backend: &B, kv_type: KvType, pieces: &[usize]) -> Vec<f32> {
    let model = Model::new(backend);
    let mut pool = backend.pool(spec(kv_type)).unwrap();
    let (tables, ids) = (Tables::new(3, 5), tokens());
    let (mut logits, mut start) = (Vec::new(), 0);
    for piece in pieces {
        logits.extend(model.step(backend, &mut pool, &tables, &ids[start..start + piece], start));
        start += piece;
    }
    assert_eq!(start, TOKENS);
    logits
}

#[test]
fn logits_are_near_those_of_the_cpu() {
    let options = CpuOptions { threads: 1, rounding: Rounding::Fine, ..CpuOptions::default() };
    let cpu = CpuBackend::new(options).unwrap();
    for kv_type in [KvType::F32, KvType::F16, KvType::Int8] {
        let want = run(&cpu, kv_type, &[TOKENS]);
        let got = run(&shim::backend(), kv_type, &[TOKENS]);
        let largest = want.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let error = got.iter().zip(&want).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        // Fine activations have 16 bits. A value of KV that is rounded the other way differs by a step of its type.
        let bound = match kv_type {
            KvType::F32 => 1e-3,
            KvType::F16 => 1e-2,
            KvType::Int8 => 3e-2,
        };
        assert!(error <= bound * largest, "{}: {error} of {largest}", kv_type.name());
    }
}

/// Says something only where the device is a GPU: it has to give the very bits that the CPU gives for it.
#[test]
fn i1_a_device_gives_the_bits_of_the_shim() {
    for kv_type in [KvType::F32, KvType::F16, KvType::Int8] {
        let [want, got] = [shim::on_cpu(), shim::backend()].map(|device| run(&device, kv_type, &[9, 33, 2]));
        assert_eq!(bits(&got), bits(&want), "{}", kv_type.name());
    }
}

#[test]
fn i1_the_pieces_of_a_prompt_change_no_bit() {
    let backend = shim::backend();
    let want = run(&backend, KvType::F16, &[TOKENS]);
    // In tiles and by partition, by matrix and by vector kernels.
    for pieces in [&[1, 17, 20, 6][..], &[9, 33, 1, 1]] {
        assert_eq!(bits(&run(&backend, KvType::F16, pieces)), bits(&want), "{pieces:?}");
    }
    assert_eq!(bits(&run(&shim::recorded(5).0, KvType::F16, &[20, 24])), bits(&want));
}

#[test]
fn i1_cells_that_left_and_came_back_continue_with_the_same_bits() {
    let (backend, ids) = (shim::backend(), tokens());
    for kv_type in [KvType::F16, KvType::Int8] {
        let model = Model::new(&backend);
        let mut pool = backend.pool(spec(kv_type)).unwrap();
        let before = Tables::new(0, 1);
        let chunk = 2 * PAGE_TOKENS;
        model.step(&backend, &mut pool, &before, &ids[..chunk], 0);
        let size = spec(kv_type).cell_bytes(KV_HEADS, chunk);
        let first_pages = |tables: &[Vec<PageId>]| -> Vec<Vec<PageId>> {
            tables.iter().map(|table| table[..2].to_vec()).collect()
        };
        let mut cells = vec![vec![0; size]; LAYERS];
        for (cell, tables) in cells.iter_mut().zip(&before.0) {
            let pages = first_pages(tables);
            let pages: Vec<&[PageId]> = pages.iter().map(Vec::as_slice).collect();
            backend.gather_cell(&pool, &pages, chunk, cell).unwrap();
        }
        let want = model.step(&backend, &mut pool, &before, &ids[chunk..], chunk);
        // A new pool, other pages, layers the other way round.
        let mut pool = backend.pool(spec(kv_type)).unwrap();
        let after = Tables::new(7, 5);
        for (cell, tables) in cells.iter().zip(&after.0).rev() {
            let pages = first_pages(tables);
            let pages: Vec<&[PageId]> = pages.iter().map(Vec::as_slice).collect();
            backend.scatter_cell(&mut pool, &pages, chunk, cell).unwrap();
        }
        let got = model.step(&backend, &mut pool, &after, &ids[chunk..], chunk);
        assert_eq!(bits(&got), bits(&want), "{}", kv_type.name());
    }
}
