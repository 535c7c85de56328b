use super::*;

const SAID: &str = "\
running 2 tests
test a ... ok
test b ... FAILED

---- b stdout ----
thread 'b' panicked at kernels/tests/x.rs:1:1:
[3] 1.0 2.0

test result: FAILED. 1 passed; 1 failed; 0 ignored
";

#[test]
fn what_a_program_said_is_told_in_a_line() {
    assert_eq!(summary(SAID), "FAILED. 1 passed; 1 failed; 0 ignored");
    assert!(failures(SAID).starts_with("thread 'b' panicked at kernels/tests/x.rs:1:1: [3] 1.0 2.0"));
    assert_eq!((summary(""), failures("")), ("it said nothing".to_owned(), String::new()));
}

/// With programs of the system in the place of tests.
#[test]
fn a_program_that_fails_or_takes_too_long_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let programs = Programs { folder: folder.path(), kernels: folder.path(), nvrtc: None };
    let missing = programs.run("cuda_model", Instant::now()).unwrap_err();
    assert_eq!(missing.code, "test_program_missing");
    for (name, text) in
        [("passes", "echo 'test result: ok. 3 passed'"), ("fails", "echo no; exit 3"), ("waits", "sleep 60")]
    {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let later = Instant::now() + Duration::from_secs(30);
    assert_eq!(programs.run("passes", later).unwrap(), "ok. 3 passed");
    assert!(programs.run("fails", later).unwrap_err().message.contains("exit status: 3"));
    let late = programs.run("waits", Instant::now()).unwrap_err();
    assert!(late.message.starts_with("not done in time"), "{late}");
}
