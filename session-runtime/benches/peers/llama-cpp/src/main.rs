//! llama.cpp as a peer of `bench engine` and `bench restore`: answers commands on standard input with seconds on standard output, so that
//! the benchmark can take turns with it in one run. Arguments: model file, threads, context length, sessions.
//!
//! - `turn CONTEXT TOKENS`: prefill CONTEXT tokens, then decode TOKENS one by one; answers both times.
//! - `sessions CONTEXT TOKENS`: prefill CONTEXT tokens into each session, then decode TOKENS in all of them at once;
//!   answers the time of the decode.
//! - `perplexity ID...`: of a text given as token ids, each from all before it.
//! - `slot CONTEXT FILE`: prefill CONTEXT tokens and save the session to FILE, as llama.cpp's server saves a slot; answers
//!   the bytes.
//! - `resume CONTEXT TOKENS FILE`: load FILE, a session of CONTEXT tokens, and read TOKENS more for the logits of the last;
//!   answers the time of both.

use std::error::Error;
use std::io::{BufRead, Write};
use std::num::NonZeroU32;
use std::time::Instant;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;

/// Tokens of one call while a prompt is read: llama.cpp's own default.
const STEP: usize = 512;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Peer<'a> {
    context: LlamaContext<'a>,
    batch: LlamaBatch<'a>,
    vocab: usize,
    sessions: usize,
}

impl Peer<'_> {
    /// The tokens that `bench engine` reads, too.
    fn token(&self, index: usize) -> LlamaToken {
        LlamaToken::new(((index * 7919 + 13) % self.vocab) as i32)
    }

    /// Reads `count` tokens into a session from its start.
    fn prefill(&mut self, session: usize, count: usize) -> Result<()> {
        for start in (0..count).step_by(STEP) {
            self.batch.clear();
            for index in start..(start + STEP).min(count) {
                let last = index + 1 == count;
                self.batch.add(self.token(index), index as i32, &[session as i32], last)?;
            }
            self.context.decode(&mut self.batch)?;
        }
        self.context.synchronize();
        Ok(())
    }

    /// Decodes `count` tokens at `from` in sessions `0..sessions`, one of each at a time; the seconds it took.
    fn decode(&mut self, sessions: usize, from: usize, count: usize) -> Result<f64> {
        let begun = Instant::now();
        for index in from..from + count {
            self.batch.clear();
            for session in 0..sessions {
                self.batch.add(self.token(index), index as i32, &[session as i32], true)?;
            }
            self.context.decode(&mut self.batch)?;
            std::hint::black_box(self.context.get_logits_ith(0));
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    fn perplexity(&mut self, ids: &[usize]) -> Result<f64> {
        let mut total = 0.0;
        for start in (0..ids.len()).step_by(STEP) {
            let end = (start + STEP).min(ids.len());
            self.batch.clear();
            for (index, id) in ids[start..end].iter().enumerate() {
                self.batch.add(LlamaToken::new(*id as i32), (start + index) as i32, &[0], true)?;
            }
            self.context.decode(&mut self.batch)?;
            for index in start..end.min(ids.len() - 1) {
                let logits = self.context.get_logits_ith((index - start) as i32);
                let highest = logits.iter().copied().fold(f32::MIN, f32::max);
                let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
                total += sum.ln() - f64::from(logits[ids[index + 1]] - highest);
            }
        }
        Ok((total / (ids.len() - 1) as f64).exp())
    }

    fn slot(&mut self, length: usize, file: &str) -> Result<usize> {
        self.prefill(0, length)?;
        let tokens: Vec<LlamaToken> = (0..length).map(|index| self.token(index)).collect();
        Ok(self.context.state_seq_save_file(file, 0, &tokens)?)
    }

    fn resume(&mut self, length: usize, tokens: usize, file: &str) -> Result<f64> {
        let begun = Instant::now();
        self.context.state_seq_load_file(file, 0, length)?;
        self.batch.clear();
        for index in length..length + tokens {
            let last = index + 1 == length + tokens;
            self.batch.add(self.token(index), index as i32, &[0], last)?;
        }
        self.context.decode(&mut self.batch)?;
        std::hint::black_box(self.context.get_logits_ith(tokens as i32 - 1));
        Ok(begun.elapsed().as_secs_f64())
    }

    fn answer(&mut self, command: &str) -> Result<String> {
        let mut words = command.split_whitespace();
        let name = words.next().ok_or("no command")?;
        let mut words: Vec<&str> = words.collect();
        let file = if matches!(name, "slot" | "resume") { words.pop() } else { None };
        let numbers = words
            .into_iter().map(str::parse).collect::<std::result::Result<Vec<usize>, _>>()?;
        self.context.clear_kv_cache();
        match (name, numbers.as_slice()) {
            ("turn", &[length, tokens]) => {
                let begun = Instant::now();
                self.prefill(0, length)?;
                let prefill = begun.elapsed().as_secs_f64();
                let decode = self.decode(1, length, tokens)?;
                Ok(format!("{prefill} {decode}"))
            }
            ("sessions", &[length, tokens]) => {
                for session in 0..self.sessions {
                    self.prefill(session, length)?;
                }
                Ok(self.decode(self.sessions, length, tokens)?.to_string())
            }
            ("slot", &[length]) => Ok(self.slot(length, file.unwrap_or_default())?.to_string()),
            ("resume", &[length, tokens]) => {
                Ok(self.resume(length, tokens, file.unwrap_or_default())?.to_string())
            }
            ("perplexity", ids) if ids.len() > 1 => Ok(self.perplexity(ids)?.to_string()),
            _ => Err(format!("'{command}' is not a command").into()),
        }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, threads, length, sessions] = arguments.as_slice() else {
        return Err("arguments: MODEL THREADS CONTEXT SESSIONS".into());
    };
    let (threads, length, sessions): (i32, u32, u32) = (threads.parse()?, length.parse()?, sessions.parse()?);
    let mut backend = LlamaBackend::init()?;
    backend.void_logs();
    let model = LlamaModel::load_from_file(&backend, path, &LlamaModelParams::default())?;
    let parameters = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(length))
        .with_n_batch(STEP as u32)
        .with_n_ubatch(STEP as u32)
        .with_n_seq_max(sessions)
        .with_kv_unified(true)
        .with_n_threads(threads)
        .with_n_threads_batch(threads);
    let context = model.new_context(&backend, parameters)?;
    let vocab = model.n_vocab() as usize;
    let mut peer = Peer { context, batch: LlamaBatch::new(STEP, 1), vocab, sessions: sessions as usize };
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    for line in std::io::stdin().lock().lines() {
        let answer = peer.answer(&line?)?;
        writeln!(out, "{answer}")?;
    }
    Ok(())
}
