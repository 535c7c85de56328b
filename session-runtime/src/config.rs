//! Everything an application or operator can choose, with its default and its check.

use std::path::PathBuf;
use std::time::Duration;

use kernels::backend::KvType;
use kernels::cpu::Rounding;

use crate::agent::GuestLimits;
use crate::error::Error;
use crate::models::Precision;
use crate::restore::plan::RestoreMode;
use crate::scheduler::tenants::TenantQuotas;
use crate::scheduler::{IdlePolicyName, Speculation};
use crate::session::host::SessionLimits;

/// How much of a tier's speed is used; for tests and for showing plans on fast tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttle {
    /// Bytes per second; unset: as fast as the tier is.
    pub bytes_per_s: Option<u64>,
    /// Added to each read.
    pub latency: Duration,
}

/// Which device runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first GPU where a driver, a compiler for its kernels and a device of use are found; else the CPU, and a warning
    /// says why.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number in the driver's order, or nothing.
    Cuda(usize),
}

impl std::str::FromStr for Device {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let unknown = || format!("'{name}' is not a device: use auto, cpu, cuda, or cuda:N for GPU number N");
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            other => match other.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(number)) => Ok(Self::Cuda(number)),
                _ => Err(unknown()),
            },
        }
    }
}

/// The configuration of a runtime.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where journal, index and cells are kept.
    pub data_dir: PathBuf,
    /// Alias of the model, or the path of a GGUF file or of a checkpoint's directory.
    pub model: String,
    /// How the floats of a checkpoint are kept on the device.
    pub weights: Precision,
    /// How K and V are stored.
    pub kv_type: KvType,
    /// How activations are rounded before quantised weights; a field of the contract.
    pub rounding: Rounding,
    /// Which device runs the model; a field of the contract, by its numerics class.
    pub device: Device,
    /// The library of NVRTC, which compiles kernels for a GPU; unset: the one that the system finds.
    pub nvrtc: Option<PathBuf>,
    /// Bytes of KV pages on the device.
    pub device_budget_bytes: u64,
    /// Bytes of saved KV in host memory, from where it comes back sooner than from disk; 0: none is kept there. Beside the
    /// device's own pages that pays where the device holds fewer sessions than come back before long.
    pub host_budget_bytes: u64,
    /// Bytes of cells on disk.
    pub disk_quota_bytes: u64,
    /// How much of each tier each tenant may take. Without a quota, tenants still have shares under
    /// pressure, and turns.
    pub tenants: TenantQuotas,
    /// Threads of the CPU backend; 0: one for each core.
    pub threads: usize,
    /// Most tokens of a session; 0: what the model was made for, at most 32,768.
    pub context_length: usize,
    /// How restores choose.
    pub restore_mode: RestoreMode,
    /// What becomes of KV while its session rests.
    pub idle_policy: IdlePolicyName,
    /// Idle time after which KV leaves the device unasked, whatever the policy says.
    pub idle_ttl: Duration,
    /// Whether sealed chunks are saved when a session becomes idle, so that they survive the process.
    pub save_when_idle: bool,
    /// When the next tokens are guessed from the history; what is sampled does not change.
    pub speculation: Speculation,
    /// Whether a session that begins takes the KV of the tokens it has in common with other sessions.
    pub share_prefixes: bool,
    /// How long reading a piece of a prompt may be predicted to take while sessions wait for their next token; a
    /// piece has at least a page.
    pub step_time: Duration,
    /// Whether turns that a crash interrupted go on at start.
    pub resume_turns: bool,
    /// Directories searched for guests, `NAME.wasm`.
    pub guests: Vec<PathBuf>,
    /// Component files of agents and tools.
    pub components: Vec<PathBuf>,
    /// Directories that file grants must lie in; without one nothing can be granted.
    pub grant_roots: Vec<PathBuf>,
    /// Limits of guests.
    pub limits: GuestLimits,
    /// Limits of sessions.
    pub sessions: SessionLimits,
    /// Throttle of the disk tier.
    pub throttle: Throttle,
    /// Throttle of the host tier.
    pub host_throttle: Throttle,
    /// File to which the scheduler writes a trace for `session-runtime replay`; it must not exist.
    pub trace: Option<PathBuf>,
    /// Keeps this runtime's saved KV apart from that of others with another salt.
    pub tenant_salt: String,
    /// Command that opens the data directory's index in a process of its own, so that a damaged index
    /// cannot take this one down: the program and its first arguments; the directory is added.
    pub probe: Option<Vec<std::ffi::OsString>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("session-runtime-data"),
            model: "qwen2.5-coder-0.5b".to_owned(),
            weights: Precision::default(),
            kv_type: KvType::default(),
            rounding: Rounding::default(),
            device: Device::default(),
            nvrtc: None,
            device_budget_bytes: 1 << 30,
            host_budget_bytes: 256 << 20,
            disk_quota_bytes: 16 << 30,
            tenants: TenantQuotas::default(),
            threads: 0,
            context_length: 0,
            restore_mode: RestoreMode::Planned,
            idle_policy: IdlePolicyName::default(),
            idle_ttl: Duration::from_secs(300),
            save_when_idle: true,
            speculation: Speculation::Auto,
            share_prefixes: true,
            step_time: Duration::from_millis(150),
            resume_turns: true,
            guests: Vec::new(),
            components: Vec::new(),
            grant_roots: Vec::new(),
            limits: GuestLimits::default(),
            sessions: SessionLimits::default(),
            throttle: Throttle::default(),
            host_throttle: Throttle::default(),
            trace: None,
            tenant_salt: String::new(),
            probe: None,
        }
    }
}

/// Longest context used unless asked otherwise.
pub const CONTEXT_LENGTH_DEFAULT: usize = 32_768;

impl Config {
    /// Refuses values that cannot work, by name.
    ///
    /// # Errors
    /// `config_invalid`.
    pub fn validate(&self) -> Result<(), Error> {
        let bad = |what: &str| Err(Error::invalid("config_invalid", what.to_owned()));
        if self.data_dir.as_os_str().is_empty() {
            return bad("data_dir is empty: name a directory");
        }
        if self.threads > 1024 {
            return bad("threads is over 1024: use 0 for one thread for each core");
        }
        if self.step_time.is_zero() {
            return bad("step_time is zero: give the milliseconds a step may take, such as 150");
        }
        if self.throttle.bytes_per_s == Some(0) {
            return bad("the disk throttle is 0 bytes per second: give a positive rate or none");
        }
        if self.host_throttle.bytes_per_s == Some(0) {
            return bad("the host throttle is 0 bytes per second: give a positive rate or none");
        }
        if self.tenant_salt.contains('\0') {
            return bad("tenant_salt has a NUL: use another text");
        }
        if let Some(name) = self.tenants.named.keys().find(|name| !crate::ids::is_valid(name)) {
            let what = "has a quota and is no tenant's name: use 1 to 64 letters, digits, '_', '-' or '.'";
            return Err(Error::invalid("config_invalid", format!("'{name}' {what}")));
        }
        if self.sessions.sessions == 0 || self.sessions.default_max_tokens == 0 {
            return bad("limits of sessions and tokens must be positive");
        }
        self.limits.validate()
    }

    /// Threads of the CPU backend.
    pub fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            count => count,
        }
    }
}
