//! Options every command has, and the configuration they make.

use std::path::PathBuf;

use clap::Args;
use kernels::backend::KvType;
use kernels::cpu::Rounding;

use super::bytes::Bytes;
use super::failure::{Failure, Outcome};
use super::quota::{self, QuotaOption};
use crate::config::{Config, Device};
use crate::models::Precision;
use crate::restore::plan::RestoreMode;
use crate::scheduler::{IdlePolicyName, Speculation};

/// Model used where none is named.
pub(super) const DEFAULT_MODEL: &str = "qwen2.5-coder-0.5b";

/// Options every command has.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Global options")]
pub(super) struct Options {
    /// Where sessions are kept [default: session-runtime in $XDG_DATA_HOME, or in .local/share of the home folder]
    #[arg(long, global = true, value_name = "DIR", env = "SESSION_RUNTIME_DATA")]
    data_dir: Option<PathBuf>,
    /// Model: an alias of `model ls`, a .gguf file, or a directory with config.json [default: qwen2.5-coder-0.5b]
    #[arg(long, global = true, value_name = "NAME", env = "SESSION_RUNTIME_MODEL")]
    pub(super) model: Option<String>,
    /// Quantises the floats of a checkpoint at load: q8_0 or none [default: none]
    #[arg(long, global = true, value_name = "TYPE")]
    quantise: Option<Precision>,
    /// How activations are rounded before quantised weights: fast (to 8 bits, outliers to 16) or fine (to 16 bits,
    /// twice the multiplications). KV of one is not used by the other [default: fast]
    #[arg(long, global = true, value_name = "NAME")]
    rounding: Option<Rounding>,
    /// What runs the model: auto (a GPU where one can be used, else the CPU), cpu, cuda, or cuda:N for GPU number N. KV of
    /// one is not used by the other [default: auto]
    #[arg(long, global = true, value_name = "NAME", env = "SESSION_RUNTIME_DEVICE")]
    device: Option<Device>,
    /// Library of NVRTC, which compiles the kernels for a GPU [default: the one that the system finds]
    #[arg(long, global = true, value_name = "FILE", env = "SESSION_RUNTIME_NVRTC")]
    nvrtc: Option<PathBuf>,
    /// How K and V are stored: f16, f32 for logits that show no rounding in twice the bytes, or int8 in little more than
    /// half of them. KV of one is not used by another [default: f16]
    #[arg(long, global = true, value_name = "TYPE")]
    kv_type: Option<KvType>,
    /// Guesses next tokens from the history and checks them, which changes none: auto (where measured faster), always or
    /// off [default: auto]
    #[arg(long, global = true, value_name = "WHEN")]
    speculate: Option<Speculation>,
    /// Has every session compute its own KV, also that of a beginning it has in common with others
    #[arg(long, global = true)]
    no_sharing: bool,
    /// Memory for KV, such as 256MiB [default: 1GiB]
    #[arg(long, global = true, value_name = "BYTES")]
    pub(super) device_budget: Option<Bytes>,
    /// Host memory for saved KV, from where it comes back sooner than from disk; 0 keeps none there [default: 256MiB]
    #[arg(long, global = true, value_name = "BYTES")]
    pub(super) host_budget: Option<Bytes>,
    /// Disk space for saved KV, such as 4GiB [default: 16GiB]
    #[arg(long, global = true, value_name = "BYTES")]
    disk_quota: Option<Bytes>,
    /// Most KV of a tenant, such as acme:device=256MiB,host=64MiB,disk=1GiB; * in place of the name is every tenant without a quota of
    /// its own; may be repeated [default: none]
    #[arg(long = "tenant-quota", global = true, value_name = "NAME:TIER=BYTES,...")]
    tenant_quotas: Vec<QuotaOption>,
    /// Threads of the model [default: one per processor]
    #[arg(long, global = true, value_name = "N")]
    threads: Option<usize>,
    /// How KV comes back: planned (by measured costs), load, recompute, alternate (every other chunk) or cut:N (the N
    /// lowest layers recomputed, the others loaded) [default: planned]
    #[arg(long, global = true, value_name = "MODE")]
    restore: Option<RestoreMode>,
    /// What becomes of KV while its session rests: break_even (kept for as long as moving it takes), tool_history (learns how
    /// long each tool takes), declared (believes what tools declare), fixed (kept until its TTL), lru or drop (baselines)
    /// [default: tool_history]
    #[arg(long, global = true, value_name = "NAME")]
    pub(super) idle_policy: Option<IdlePolicyName>,
    /// Slows reads of saved KV on disk to this many bytes per second
    #[arg(long, global = true, value_name = "BYTES")]
    throttle_disk: Option<Bytes>,
    /// Slows reads of saved KV in host memory to this many bytes per second
    #[arg(long, global = true, value_name = "BYTES")]
    throttle_host: Option<Bytes>,
    /// New file for a trace of what the scheduler does, which `replay` reads; it holds no text and no token
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Directory of agents and tools (NAME.wasm); may be repeated [default: guests beside the program, in the folder
    /// above it, and in the data directory]
    #[arg(long, global = true, value_name = "DIR")]
    guests: Vec<PathBuf>,
    /// What is logged to standard error: error, warn, info, debug, or a filter per module
    #[arg(long, global = true, value_name = "LEVEL", env = "SESSION_RUNTIME_LOG", default_value = "warn")]
    pub(super) log: String,
}

impl Options {
    /// The data directory.
    pub(super) fn data_dir(&self) -> Outcome<PathBuf> {
        if let Some(dir) = &self.data_dir {
            return Ok(dir.clone());
        }
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
        base.map(|base| base.join("session-runtime")).ok_or_else(|| {
            Failure::usage("neither XDG_DATA_HOME nor HOME is set: name a directory with --data-dir")
        })
    }

    /// The model's name.
    pub(super) fn model_name(&self) -> &str {
        self.model.as_deref().unwrap_or(DEFAULT_MODEL)
    }

    /// Directories that are searched for guests: those given, else those beside the program and in the
    /// data directory.
    pub(super) fn guest_dirs(&self) -> Outcome<Vec<PathBuf>> {
        if !self.guests.is_empty() {
            if let Some(missing) = self.guests.iter().find(|dir| !dir.is_dir()) {
                let message = format!("--guests names {}, which is not a directory", missing.display());
                return Err(Failure::usage(message));
            }
            return Ok(self.guests.clone());
        }
        let program = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_owned()));
        let beside = program.iter().flat_map(|dir| [dir.join("guests"), dir.join("../guests")]);
        Ok(beside.chain([self.data_dir()?.join("guests")]).filter(|dir| dir.is_dir()).collect())
    }

    /// The runtime's configuration.
    pub(super) fn config(&self) -> Outcome<Config> {
        let probe = std::env::current_exe().ok().map(|exe| vec![exe.into_os_string(), "store-probe".into()]);
        let mut config = Config {
            data_dir: self.data_dir()?,
            model: self.model_name().to_owned(),
            guests: self.guest_dirs()?,
            probe,
            trace: self.trace.clone(),
            ..Config::default()
        };
        if let Some(precision) = self.quantise {
            config.weights = precision;
        }
        config.share_prefixes = !self.no_sharing;
        if let Some(speculation) = self.speculate {
            config.speculation = speculation;
        }
        config.device = self.device.unwrap_or_default();
        config.nvrtc.clone_from(&self.nvrtc);
        if let Some(kv_type) = self.kv_type {
            config.kv_type = kv_type;
        }
        if let Some(rounding) = self.rounding {
            config.rounding = rounding;
        }
        if let Some(Bytes(bytes)) = self.device_budget {
            config.device_budget_bytes = bytes;
        }
        if let Some(Bytes(bytes)) = self.host_budget {
            config.host_budget_bytes = bytes;
        }
        if let Some(Bytes(bytes)) = self.disk_quota {
            config.disk_quota_bytes = bytes;
        }
        config.tenants = quota::quotas(&self.tenant_quotas)?;
        if let Some(threads) = self.threads {
            config.threads = threads;
        }
        if let Some(policy) = self.idle_policy {
            config.idle_policy = policy;
        }
        if let Some(mode) = self.restore {
            config.restore_mode = mode;
        }
        config.throttle.bytes_per_s = rate("--throttle-disk", self.throttle_disk)?;
        config.host_throttle.bytes_per_s = rate("--throttle-host", self.throttle_host)?;
        Ok(config)
    }
}

/// The rate that an option gives.
fn rate(option: &str, bytes: Option<Bytes>) -> Outcome<Option<u64>> {
    match bytes {
        Some(Bytes(0)) => Err(Failure::usage(format!("{option} must be at least one byte per second"))),
        other => Ok(other.map(|Bytes(bytes)| bytes)),
    }
}
