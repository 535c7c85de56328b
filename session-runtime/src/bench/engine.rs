//! `bench engine`: tokens per second of prefill and decode at a short and a long context and with several sessions at
//! once, beside a peer where one is given, and as shares of what the machine can do; perplexity of a fixed text,
//! bytes of the weights, seconds of loading, and what the runtime adds to a token.

use std::sync::Arc;
use std::time::Instant;

use kernels::backend::Backend;
use kernels::cpu::ceiling;

use super::overhead;
use super::peer::Peer;
use super::{Figure, Setup, median};
use crate::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::contract::Contract;
use crate::kv::pool::PagePool;
use crate::kv::table::BlockTable;
use crate::models::architecture::ModelConfig;
use crate::models::progress::Silent;
use crate::models::{self, LoadedModel, Tokenizer};
use crate::runtime::device::{self, ChosenDevice};
use crate::runtime::{self, STEP_ROWS};

/// Runs of every case.
const RUNS: usize = 5;
/// Tokens decoded after a prompt.
const DECODE: usize = 64;
/// Sessions that decode at once, and the context each of them has.
const SESSIONS: usize = 8;
const SESSION_CONTEXT: usize = 128;
/// Prompt lengths.
const PROMPTS: [usize; 2] = [512, 4000];
/// Room for the longest prompt and what is decoded after it.
const CONTEXT: usize = 4096;
/// A text of about 2,000 tokens.
pub(super) const PASSAGE: &str = include_str!("../../tests/fixtures/passage.txt");

/// What a peer is called in the results.
const PEER: &str = "llama.cpp";

/// Measures every model, ours and the peer taking turns.
pub(super) fn run(setup: &Setup, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    for name in &setup.models {
        let begun = Instant::now();
        let model = models::open_as(name, setup.config.weights, &Silent)?;
        let read_seconds = begun.elapsed().as_secs_f64();
        match device::choose(&setup.config, &model.config)? {
            ChosenDevice::Cpu(backend, _) => {
                let threads = backend.threads();
                let ceilings = || -> Measured {
                    Ok((ceiling::memory_read(threads), Some(ceiling::int8_multiply_adds(threads))))
                };
                let subject = Subject::open(name, backend, model, read_seconds, setup)?;
                measure(subject, Ceilings::measured_by(&ceilings), tell)?;
            }
            ChosenDevice::Cuda(backend) => {
                let gpu = Arc::clone(&backend);
                let ceilings = || -> Measured { Ok((gpu.memory_bandwidth()?, None)) };
                let subject = Subject::open(name, backend, model, read_seconds, setup)?;
                measure(subject, Ceilings::measured_by(&ceilings), tell)?;
            }
        }
    }
    Ok(())
}

/// Measures one model on one device.
fn measure<B: Backend>(
    mut subject: Subject<B>,
    mut ceilings: Ceilings<'_>,
    tell: &mut (dyn FnMut(Figure) + Send),
) -> Result<(), Error> {
    for prompt in PROMPTS {
        let mut turns = Turns::default();
        for _ in 0..RUNS {
            ceilings.measure()?;
            subject.turn(prompt, &mut turns)?;
        }
        subject.tell_turns(prompt, turns, &ceilings, tell);
    }
    subject.layers(tell)?;
    subject.sessions(tell)?;
    subject.perplexity(tell)?;
    let once = |figure| Figure { n: 1, ..figure };
    let resident =
        figure(&subject.case("weights"), "bytes_resident", subject.engine.weight_bytes() as f64, "B");
    tell(once(share(resident, "file", subject.file_bytes as f64)));
    tell(once(figure(&subject.case("load"), "seconds", subject.load_seconds, "s")));
    ceilings.tell(tell);
    subject.overhead(tell)
}

fn figure(case: &str, metric: &'static str, value: f64, unit: &'static str) -> Figure {
    let (against, ratio) = (None, None);
    Figure { bench: "engine", case: case.to_owned(), metric, value, unit, against, ratio, n: RUNS }
}

/// `value` with its share of `ceiling`.
fn share(figure: Figure, against: &'static str, ceiling: f64) -> Figure {
    Figure { against: Some(against), ratio: Some(figure.value / ceiling), ..figure }
}

/// Weights of the layers: products of one row.
fn products_per_token(config: &ModelConfig) -> usize {
    let attention = 2 * config.heads + 2 * config.kv_heads;
    config.layers * config.hidden * (attention * config.head_dim + 3 * config.ffn)
}

/// Bytes a second that a device's memory moves, and products of int8 a second, where its kernels use those.
type Measured = Result<(f64, Option<f64>), Error>;

/// What the device can do, measured between the runs.
struct Ceilings<'a> {
    by: &'a dyn Fn() -> Measured,
    read: Vec<f64>,
    products: Vec<f64>,
}

impl<'a> Ceilings<'a> {
    fn measured_by(by: &'a dyn Fn() -> Measured) -> Self {
        Self { by, read: Vec::new(), products: Vec::new() }
    }

    fn measure(&mut self) -> Result<(), Error> {
        let (read, products) = (self.by)()?;
        self.read.push(read);
        self.products.extend(products);
        Ok(())
    }

    fn tell(self, tell: &mut (dyn FnMut(Figure) + Send)) {
        tell(figure("machine/memory-read", "bytes_per_s", median(self.read), "B/s"));
        if !self.products.is_empty() {
            tell(figure("machine/int8-peak", "products_per_s", median(self.products), "1/s"));
        }
    }
}

/// Seconds of ours and of the peer.
#[derive(Default)]
struct Times {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

impl Times {
    /// Tokens per second of `tokens` in the median run, beside the peer's where it ran.
    fn figure(&self, case: &str, tokens: usize) -> Figure {
        let ours = figure(case, "tok_per_s", tokens as f64 / median(self.ours.clone()), "tok/s");
        match self.theirs.is_empty() {
            true => ours,
            false => share(ours, PEER, tokens as f64 / median(self.theirs.clone())),
        }
    }
}

#[derive(Default)]
struct Turns {
    prefill: Times,
    decode: Times,
}

struct Subject<B: Backend> {
    name: String,
    engine: Engine<B>,
    pool: PagePool,
    tokenizer: Tokenizer,
    peer: Option<Peer>,
    contract: Contract,
    file_bytes: u64,
    load_seconds: f64,
}

impl<B: Backend> Subject<B> {
    fn open(
        name: &str,
        backend: Arc<B>,
        model: LoadedModel,
        read_seconds: f64,
        setup: &Setup,
    ) -> Result<Self, Error> {
        let threads = setup.config.thread_count();
        let begun = Instant::now();
        let rows = CONTEXT.max(SESSIONS * (SESSION_CONTEXT + DECODE)) + 64;
        let kv_type = setup.config.kv_type;
        let contract = runtime::contract(&model, backend.as_ref(), kv_type, "");
        let budget_bytes = (model.config.kv_token_bytes(kv_type) * rows) as u64;
        let options =
            EngineOptions { budget_bytes, context_length: CONTEXT + 64, step_rows: STEP_ROWS, kv_type };
        let engine = engine::open(backend, &model, options, &Silent)?;
        engine.finish()?;
        let load_seconds = read_seconds + begun.elapsed().as_secs_f64();
        let pool = PagePool::new(engine.pool_spec().pages);
        let file_bytes = model.weights.file_bytes();
        let peer = setup.peer.as_deref();
        let peer =
            peer.map(|program| Peer::start(program, &model.path, threads, rows, SESSIONS)).transpose()?;
        Ok(Self {
            name: name.to_owned(),
            engine,
            pool,
            tokenizer: model.tokenizer,
            peer,
            contract,
            file_bytes,
            load_seconds,
        })
    }

    fn case(&self, part: &str) -> String {
        format!("{}/{part}", self.name)
    }

    /// Tokens that repeat late: the peer reads the same.
    fn tokens(&self, count: usize) -> Vec<u32> {
        let vocab = self.engine.config().vocab;
        (0..count).map(|index| ((index * 7919 + 13) % vocab) as u32).collect()
    }

    fn table(&mut self, tokens: usize) -> Result<BlockTable, Error> {
        let config = self.engine.config();
        let mut table = BlockTable::new(config.layers, config.kv_heads);
        table.prepare(&mut self.pool, 0, tokens).map_err(Error::internal)?;
        Ok(table)
    }

    /// Reads `tokens` into a table from its start, a step at a time; logits of the last one alone.
    fn prefill(&mut self, table: &BlockTable, tokens: &[u32]) -> Result<(), Error> {
        let layers = self.engine.config().layers;
        let mut logits = Vec::new();
        for start in (0..tokens.len()).step_by(STEP_ROWS) {
            let end = (start + STEP_ROWS).min(tokens.len());
            let wanted = if end < tokens.len() { LogitRows::None } else { LogitRows::Last };
            let rows = SequenceRows { tokens: &tokens[start..end], start, tables: table, logits: wanted };
            self.engine.forward(&[rows], layers, &mut logits)?;
        }
        Ok(())
    }

    /// Decodes the tokens from `from` on, one of each session at a time; seconds.
    fn decode(&mut self, tables: &[BlockTable], tokens: &[u32], from: usize) -> Result<f64, Error> {
        let layers = self.engine.config().layers;
        let mut logits = Vec::new();
        let begun = Instant::now();
        for index in from..tokens.len() {
            logits.clear();
            let rows: Vec<SequenceRows<'_>> = tables
                .iter()
                .map(|tables| SequenceRows {
                    tokens: &tokens[index..=index],
                    start: index,
                    tables,
                    logits: LogitRows::Last,
                })
                .collect();
            self.engine.forward(&rows, layers, &mut logits)?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    /// One prompt of `length` tokens and what is decoded after it, ours and the peer's.
    fn turn(&mut self, length: usize, turns: &mut Turns) -> Result<(), Error> {
        let tokens = self.tokens(length + DECODE);
        let mut table = self.table(tokens.len())?;
        let begun = Instant::now();
        self.prefill(&table, &tokens[..length])?;
        turns.prefill.ours.push(begun.elapsed().as_secs_f64());
        turns.decode.ours.push(self.decode(std::slice::from_ref(&table), &tokens, length)?);
        table.truncate(&mut self.pool, 0);
        if let Some(peer) = &mut self.peer
            && let [prefill, decode] = peer.ask(&format!("turn {length} {DECODE}"))?[..]
        {
            turns.prefill.theirs.push(prefill);
            turns.decode.theirs.push(decode);
        }
        Ok(())
    }

    fn tell_turns(
        &self,
        length: usize,
        turns: Turns,
        ceilings: &Ceilings<'_>,
        tell: &mut (dyn FnMut(Figure) + Send),
    ) {
        let case = self.case(&format!("prefill-{length}"));
        let prefill = turns.prefill.figure(&case, length);
        // The head is multiplied with one row of a prompt and does not count.
        let products = prefill.value * products_per_token(self.engine.config()) as f64;
        tell(prefill);
        let products = figure(&case, "products_per_s", products, "1/s");
        tell(if ceilings.products.is_empty() {
            products
        } else {
            share(products, "int8-peak", median(ceilings.products.clone()))
        });
        let case = self.case(&format!("decode-{length}"));
        let decode = turns.decode.figure(&case, DECODE);
        let kv = self.engine.config().kv_token_bytes(self.engine.pool_spec().kv_type) * (length + DECODE / 2);
        let read = decode.value * (self.engine.weight_bytes() + kv) as f64;
        tell(decode);
        tell(share(figure(&case, "bytes_per_s", read, "B/s"), "memory-read", median(ceilings.read.clone())));
    }

    /// Milliseconds of each layer of a prompt. Apart from the other runs: a device that is waited for after each layer is
    /// slower than one that is not.
    fn layers(&mut self, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
        for length in PROMPTS {
            let tokens = self.tokens(length);
            let mut table = self.table(tokens.len())?;
            self.engine.measure_layers();
            for _ in 0..RUNS {
                self.prefill(&table, &tokens)?;
            }
            table.truncate(&mut self.pool, 0);
            for (layer, seconds) in self.engine.take_layer_seconds().into_iter().enumerate() {
                let case = self.case(&format!("prefill-{length}/layer-{layer}"));
                tell(figure(&case, "ms", seconds * 1e3 / RUNS as f64, "ms"));
            }
        }
        Ok(())
    }

    /// Several sessions that decode at once; the sum of their tokens.
    fn sessions(&mut self, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
        let tokens = self.tokens(SESSION_CONTEXT + DECODE);
        let mut times = Times::default();
        for _ in 0..RUNS {
            let mut tables = Vec::new();
            for _ in 0..SESSIONS {
                let table = self.table(tokens.len())?;
                self.prefill(&table, &tokens[..SESSION_CONTEXT])?;
                tables.push(table);
            }
            times.ours.push(self.decode(&tables, &tokens, SESSION_CONTEXT)?);
            for mut table in tables {
                table.truncate(&mut self.pool, 0);
            }
            if let Some(peer) = &mut self.peer {
                times.theirs.extend(peer.ask(&format!("sessions {SESSION_CONTEXT} {DECODE}"))?);
            }
        }
        tell(times.figure(&self.case(&format!("decode-{SESSIONS}-sessions")), SESSIONS * DECODE));
        Ok(())
    }

    /// What a token takes besides the forward pass.
    fn overhead(self, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
        let (prompt, case) = (self.tokens(PROMPTS[0]), self.case("overhead"));
        // The peer's threads are not to be in the way.
        drop(self.peer);
        let overhead =
            overhead::measure(self.engine, self.contract, self.tokenizer, &prompt, (RUNS, DECODE))?;
        tell(figure(&case, "us_per_token", median(overhead.scheduler) * 1e6, "us"));
        tell(figure(&case, "us_per_token_heard", median(overhead.heard) * 1e6, "us"));
        Ok(())
    }

    /// Perplexity of a fixed text.
    fn perplexity(&mut self, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
        let tokens = self.tokenizer.encode_text(PASSAGE)?;
        let mut table = self.table(tokens.len())?;
        let (layers, vocab) = (self.engine.config().layers, self.engine.config().vocab);
        let (mut total, mut logits) = (0.0, Vec::new());
        for start in (0..tokens.len()).step_by(STEP_ROWS) {
            let end = (start + STEP_ROWS).min(tokens.len());
            logits.clear();
            let rows =
                SequenceRows { tokens: &tokens[start..end], start, tables: &table, logits: LogitRows::All };
            self.engine.forward(&[rows], layers, &mut logits)?;
            for (row, next) in logits.chunks_exact(vocab).zip(tokens.iter().skip(start + 1)) {
                let highest = row.iter().copied().fold(f32::MIN, f32::max);
                let sum: f64 = row.iter().map(|logit| f64::from(logit - highest).exp()).sum();
                total += sum.ln() - f64::from(row[*next as usize] - highest);
            }
        }
        table.truncate(&mut self.pool, 0);
        let ours = (total / (tokens.len() - 1) as f64).exp();
        let figure = Figure { n: 1, ..figure(&self.case("passage"), "perplexity", ours, "1") };
        let Some(peer) = &mut self.peer else {
            tell(figure);
            return Ok(());
        };
        let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
        let theirs = peer.ask(&format!("perplexity {}", ids.join(" ")))?;
        tell(share(figure, PEER, theirs.first().copied().unwrap_or(f64::NAN)));
        Ok(())
    }
}
