//! The runtime on a GPU, with libraries in the place of the driver's and the compiler's that run the kernels' sources on the
//! CPU: how the device is chosen and what is said of it, sessions that go on under another device, restores, and a device that
//! is lost in the middle of a turn. A process looks for these libraries once, so each case has a process of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]
#![cfg(target_os = "linux")]

#[path = "support/checkpoints.rs"]
mod checkpoints;
#[path = "../../kernels/tests/shim/library.rs"]
mod library;
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use checkpoints::TinyCheckpoint;
use serde_json::{Value, json};
use session_runtime::config::Device;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::scheduler::Speculation;
use session_runtime::session::spec::TurnRequest;
use session_runtime::{Config, Error, Runtime};

/// Set where this is the process of a case: what to do, as JSON.
const CHILD: &str = "SESSION_RUNTIME_CUDA_CHILD";
/// Somewhat over a hundred tokens of the checkpoint: a sealed chunk and more.
const OPENING: &str = "The keeper of the harbour counted 3 lamps on day 1 and wrote 12 letters, and on day 2 he read 40 of them.";

/// A case: libraries that are there, what they fail with, and what a process does with them.
struct Case<'a> {
    checkpoint: &'a TinyCheckpoint,
    directory: &'a Path,
    device: &'static str,
    /// What the driver fails with; `None`: there is no driver.
    driver: Option<&'static str>,
    /// What the compiler fails with; `None`: there is no compiler.
    compiler: Option<&'static str>,
}

impl<'a> Case<'a> {
    fn new(checkpoint: &'a TinyCheckpoint, directory: &'a Path, device: &'static str) -> Self {
        Self { checkpoint, directory, device, driver: Some(""), compiler: Some("") }
    }

    /// Runs `act` in a process of its own; what it tells.
    fn run(&self, act: &str) -> Value {
        let libraries = tempfile::tempdir().unwrap();
        let link = |name: &str| {
            std::os::unix::fs::symlink(library::path(), libraries.path().join(name)).unwrap();
        };
        if self.driver.is_some() {
            link("libcuda.so");
        }
        link("libnvrtc.so.12");
        let nvrtc = match self.compiler {
            Some(_) => libraries.path().join("libnvrtc.so.12"),
            None => PathBuf::from("/nowhere/libnvrtc.so"),
        };
        let task = json!({
            "act": act,
            "model": self.checkpoint.name(),
            "directory": self.directory.join("data"),
            "device": self.device,
            "nvrtc": nvrtc,
        });
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "child", "--nocapture"]).env(CHILD, task.to_string());
        child.env("LD_LIBRARY_PATH", libraries.path());
        child.env("FAKE_CUDA", self.driver.unwrap_or_default());
        child.env("FAKE_NVRTC", self.compiler.unwrap_or_default());
        let done = child.output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{act}: {said} {error}");
        let told = said.lines().find_map(|line| line.strip_prefix("told: "));
        serde_json::from_str(told.unwrap_or_else(|| panic!("{act}: {said} {error}"))).unwrap()
    }
}

/// What is done in the process of a case.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let task: Value = serde_json::from_str(&task).unwrap();
    let text = |name: &str| task[name].as_str().unwrap().to_owned();
    let config = Config {
        model: text("model"),
        device: text("device").parse().unwrap(),
        nvrtc: Some(text("nvrtc").into()),
        speculation: Speculation::Off,
        device_budget_bytes: 4 << 20,
        ..support::config(Path::new(&text("directory")))
    };
    let told = match Runtime::open(config).await {
        Ok(runtime) => act(&text("act"), runtime).await,
        Err(error) => refusal(&error),
    };
    // The first line is the test harness's.
    println!("\ntold: {told}");
}

fn refusal(error: &Error) -> Value {
    json!({"code": error.code, "message": error.message, "retryable": error.retryable})
}

async fn act(act: &str, runtime: Runtime) -> Value {
    let told = match act {
        "open" => json!(runtime.info().await.unwrap()),
        "begin" => {
            support::create(&runtime, "s").await;
            support::say(&runtime, "s", OPENING, 8).await;
            state(&runtime).await
        }
        "go on" => {
            support::say(&runtime, "s", "And then?", 6).await;
            state(&runtime).await
        }
        "restore" => restored(&runtime).await,
        "lose" => lost(&runtime).await,
        other => panic!("{other}"),
    };
    // A device that is lost takes nothing with it that was said.
    runtime.shutdown().await.unwrap();
    told
}

async fn state(runtime: &Runtime) -> Value {
    let tokens = runtime.tokens("s").await.unwrap();
    json!({
        "tokens": tokens,
        "kv": runtime.kv("s").await.unwrap(),
        "class": runtime.info().await.unwrap().numerics_class,
    })
}

/// One session that stays, and one that leaves before each of its turns and comes back another way.
async fn restored(runtime: &Runtime) -> Value {
    let modes = [RestoreMode::Load, RestoreMode::Recompute, RestoreMode::Cut(1), RestoreMode::Planned];
    let mut reports = Vec::new();
    for session in ["stays", "leaves"] {
        support::create(runtime, session).await;
        support::say(runtime, session, OPENING, 8).await;
        for mode in modes {
            if session == "leaves" {
                runtime.evict(session).await.unwrap();
                reports.push(runtime.restore(session, mode).await.unwrap());
            }
            support::say(runtime, session, "And then?", 4).await;
        }
    }
    json!({
        "stays": runtime.tokens("stays").await.unwrap(),
        "leaves": runtime.tokens("leaves").await.unwrap(),
        "reports": reports,
    })
}

/// A turn during which the device is lost, and what is refused after it.
async fn lost(runtime: &Runtime) -> Value {
    support::create(runtime, "s").await;
    let request = TurnRequest { input: OPENING.to_owned(), max_tokens: Some(40), ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let turn = runtime.wait_turn("s", &turn.id).await.unwrap();
    let again = TurnRequest { input: "Again?".to_owned(), ..TurnRequest::default() };
    let again = runtime.start_turn("s", again).await.unwrap();
    let again = runtime.wait_turn("s", &again.id).await.unwrap();
    json!({
        "tokens": runtime.tokens("s").await.unwrap(),
        "kv": runtime.kv("s").await.unwrap(),
        "written": turn.usage.output_tokens,
        "error": turn.error,
        "again": again.error,
        "known": runtime.device_lost().map(|error| refusal(&error)),
        "free": runtime.info().await.unwrap().device,
    })
}

/// What is said of the choice of the device, among what else an operator should know.
fn notes(told: &Value) -> Vec<String> {
    let all = told["warnings"].as_array().unwrap_or_else(|| panic!("{told}"));
    let words = all.iter().filter_map(Value::as_str).map(str::to_owned);
    words.filter(|note| note.starts_with("the CPU runs the model: ")).collect()
}

fn tokens(told: &Value) -> Vec<u64> {
    told["tokens"].as_array().unwrap_or_else(|| panic!("{told}")).iter().filter_map(Value::as_u64).collect()
}

#[test]
fn a_gpu_is_taken_where_it_can_be_used_and_else_the_reason_is_said() {
    let checkpoint = TinyCheckpoint::new("llama");
    let directory = tempfile::tempdir().unwrap();
    let case = |device, driver, compiler| Case {
        driver,
        compiler,
        ..Case::new(&checkpoint, directory.path(), device)
    };
    for device in ["auto", "cuda", "cuda:0"] {
        let told = case(device, Some("devices=2"), Some("")).run("open");
        assert_eq!(told["backend"], "CUDA, fake, compute capability 9.0, 1024 MiB", "{told}");
        assert_eq!((&told["numerics_class"], notes(&told)), (&json!("cuda-1-f32"), Vec::new()));
    }
    let told = case("cpu", Some(""), Some("")).run("open");
    assert_eq!((&told["numerics_class"], notes(&told)), (&json!("cpu-2-fast"), Vec::new()));
    // The kernels are in the cache by now, so that nothing has to be compiled.
    let told = case("cuda", Some(""), None).run("open");
    assert_eq!(told["numerics_class"], "cuda-1-f32", "{told}");

    let refused = [
        ("version=11080", Some(""), "the CUDA driver is too old (CUDA 11.8)"),
        ("devices=0", Some(""), "no CUDA device 0: the driver shows 0"),
        ("capability=75", Some(""), "the device fake has compute capability 7.5"),
        ("old-ptx", Some(""), "the CUDA driver is too old (CUDA_ERROR_UNSUPPORTED_PTX_VERSION)"),
        ("", None, "no run-time compiler: /nowhere/libnvrtc.so could not be loaded"),
        ("", Some("broken"), "compiling add.cu failed: add.cu(1): error: the test wants it so"),
    ];
    for (driver, compiler, reason) in refused {
        // Without kernels that were compiled before.
        let elsewhere = tempfile::tempdir().unwrap();
        let case = |device| Case {
            driver: Some(driver),
            compiler,
            ..Case::new(&checkpoint, elsewhere.path(), device)
        };
        let told = case("cuda").run("open");
        let code =
            if reason.starts_with("compiling") { "kernels_not_compiled" } else { "device_unavailable" };
        assert_eq!((&told["code"], &told["retryable"]), (&json!(code), &json!(false)), "{told}");
        let message = told["message"].as_str().unwrap();
        assert!(
            message.starts_with(reason) && message.ends_with("use the CPU with --device cpu"),
            "{message}"
        );
        let told = case("auto").run("open");
        let notes = notes(&told);
        assert_eq!((&told["numerics_class"], notes.len()), (&json!("cpu-2-fast"), 1), "{told}");
        let note = &notes[0];
        assert!(note.starts_with(&format!("the CPU runs the model: {reason}")), "{note}");
        assert!(!note.contains("use the CPU") && !note.contains('\n'), "{note}");
    }
    let far = case("cuda:7", Some("devices=2"), Some("")).run("open");
    assert!(far["message"].as_str().unwrap().starts_with("no CUDA device 7: the driver shows 2"), "{far}");
    let full = case("cuda", Some("memory=3000000"), Some("")).run("open");
    assert_eq!(full["code"], "out_of_memory", "{full}");
    assert!(full["message"].as_str().unwrap().contains("bytes of memory of the GPU are needed"), "{full}");
}

/// On whatever machine the tests run: a real driver, or none.
#[test]
fn a_machine_without_a_driver_takes_the_cpu() {
    let checkpoint = TinyCheckpoint::new("llama");
    let directory = tempfile::tempdir().unwrap();
    let case = Case { driver: None, ..Case::new(&checkpoint, directory.path(), "auto") };
    let told = case.run("open");
    let expected = if told["numerics_class"] == "cuda-1-f32" { 0 } else { 1 };
    assert_eq!(notes(&told).len(), expected, "{told}");
}

#[test]
fn names_of_devices_are_read_and_others_refused_with_the_choices() {
    let read = |name: &str| name.parse::<Device>();
    assert_eq!(read("auto"), Ok(Device::Auto));
    assert_eq!(read("cpu"), Ok(Device::Cpu));
    assert_eq!((read("cuda"), read("cuda:3")), (Ok(Device::Cuda(0)), Ok(Device::Cuda(3))));
    for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
        let error = read(name).unwrap_err();
        assert!(error.contains(name) && error.contains("use auto, cpu, cuda, or cuda:N"), "{error}");
    }
}

#[test]
fn i3_sessions_go_on_under_another_device_with_their_tokens_and_recomputed_kv() {
    let checkpoint = TinyCheckpoint::new("qwen2");
    let directory = tempfile::tempdir().unwrap();
    let on = |device| Case::new(&checkpoint, directory.path(), device);
    let begun = on("cpu").run("begin");
    let mut before = tokens(&begun);
    assert!(before.len() > 64, "a sealed chunk");
    for (device, class) in [("cuda", "cuda-1-f32"), ("cpu", "cpu-2-fast"), ("cuda", "cuda-1-f32")] {
        let told = on(device).run("go on");
        assert_eq!(told["class"], class);
        let report = &told["kv"]["last_restore"];
        assert_eq!(report["refused"][0]["reason"], "contract: numerics_class", "{report}");
        assert_eq!(report["cells_loaded"], 0, "{report}");
        assert_eq!(report["tokens_recomputed"], before.len(), "{report}");
        let after = tokens(&told);
        assert_eq!(after[..before.len()], before);
        before = after;
    }
    // Under the same device it is loaded.
    let report = &on("cuda").run("go on")["kv"]["last_restore"];
    assert!(report["cells_loaded"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn i1_restores_on_a_gpu_continue_with_the_tokens_of_a_session_that_stayed() {
    for name in ["llama", "gemma3"] {
        let checkpoint = TinyCheckpoint::new(name);
        let directory = tempfile::tempdir().unwrap();
        let told = Case::new(&checkpoint, directory.path(), "cuda").run("restore");
        assert_eq!(told["leaves"], told["stays"], "{name}");
        let sum = |member: &str| -> u64 {
            told["reports"].as_array().unwrap().iter().filter_map(|report| report[member].as_u64()).sum()
        };
        assert!(sum("cells_loaded") > 0 && sum("cells_recomputed") > 0, "{name}: {told}");
    }
}

#[test]
fn i2_a_device_that_is_lost_costs_kv_and_no_token() {
    let checkpoint = TinyCheckpoint::new("llama");
    let mut written = Vec::new();
    // After so many launches: while the prompt is read, and while tokens are written.
    for faults in ["lost=10", "lost=150", "lost=700"] {
        let directory = tempfile::tempdir().unwrap();
        let case = Case { driver: Some(faults), ..Case::new(&checkpoint, directory.path(), "cuda") };
        let told = case.run("lose");
        for error in [&told["error"], &told["again"], &told["known"]] {
            assert_eq!(
                (&error["code"], &error["retryable"]),
                (&json!("device_lost"), &json!(true)),
                "{told}"
            );
            assert!(
                error["message"].as_str().unwrap().contains("the tokens are not: start again"),
                "{error}"
            );
        }
        let state = told["kv"]["state"].as_str().unwrap();
        assert!(["lost", "evicted", "none"].contains(&state), "{told}");
        assert_eq!(told["free"]["pages_free"], told["free"]["pages_total"], "{told}");
        assert_eq!(told["kv"]["resident_tokens"], 0, "{told}");
        written.push(told["written"].as_u64().unwrap());
        let before = tokens(&told);
        assert!(before.len() > 64);
        let after = Case::new(&checkpoint, directory.path(), "cpu").run("go on");
        assert_eq!(tokens(&after)[..before.len()], before, "{faults}");
    }
    assert_eq!(written[0], 0, "{written:?}");
    assert!(written[2] > 0, "{written:?}");
}

#[test]
fn doctor_tells_driver_devices_and_compiler() {
    let libraries = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libnvrtc.so.12"] {
        std::os::unix::fs::symlink(library::path(), libraries.path().join(name)).unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let found = |faults: &str, device: &str| -> Vec<(String, String, String)> {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_session-runtime"));
        doctor
            .args(["doctor", "--json", "--device", device, "--data-dir"])
            .arg(directory.path().join("data"));
        doctor.env("LD_LIBRARY_PATH", libraries.path()).env("FAKE_CUDA", faults);
        let said = doctor.output().unwrap().stdout;
        let checks: Vec<Value> = serde_json::from_slice(&said).unwrap();
        let word = |check: &Value, name: &str| check[name].as_str().unwrap().to_owned();
        checks
            .iter()
            .map(|check| (word(check, "name"), word(check, "verdict"), word(check, "found")))
            .filter(|(name, ..)| name.starts_with("gpu") || name == "device")
            .collect()
    };
    let checks = found("devices=2", "auto");
    let names: Vec<&str> = checks.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["gpu", "gpu compiler", "device"], "{checks:?}");
    assert!(checks.iter().all(|(_, verdict, _)| verdict == "ok"), "{checks:?}");
    assert!(checks[0].2.starts_with("driver for CUDA 12.8; 0: fake, "), "{checks:?}");
    assert!(checks[0].2.contains("; 1: fake, "), "{checks:?}");
    assert!(checks[1].2.starts_with("NVRTC 12.8, ") && checks[1].2.contains("libnvrtc.so.12"), "{checks:?}");
    assert_eq!(checks[2].2, "GPU 0 runs the model");
    let checks = found("version=11080", "cuda");
    assert_eq!(checks[2].1, "problem", "{checks:?}");
    assert!(checks[2].2.contains("it has to support CUDA 12.0 or later"), "{checks:?}");
    assert_eq!(found("devices=0", "auto")[2].2, "the CPU runs the model");
}
