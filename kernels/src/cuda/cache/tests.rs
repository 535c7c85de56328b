use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::sources::SOURCES;
use super::*;

struct Counting(Arc<AtomicUsize>, Option<(u32, u32)>);

impl Compiler for Counting {
    fn version(&self) -> Result<(u32, u32), DeviceError> {
        self.1.ok_or_else(|| DeviceError::NoCompiler { problem: "none".to_string() })
    }

    fn compile(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError> {
        let count = self.0.fetch_add(1, Ordering::Relaxed);
        Ok(format!("code {count} of {} for {}.{}\n", source.file, capability.0, capability.1))
    }
}

fn cache(folder: &Path) -> (Cache, Arc<AtomicUsize>) {
    cache_of(folder, Some((12, 8)))
}

/// With a compiler of this version, or none.
fn cache_of(folder: &Path, version: Option<(u32, u32)>) -> (Cache, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    (Cache::new(Some(folder.join("kernels")), Box::new(Counting(count.clone(), version))), count)
}

#[test]
fn each_compiler_has_its_own_code_and_none_takes_any() {
    let folder = tempfile::tempdir().unwrap();
    let (newer, _) = cache_of(folder.path(), Some((13, 0)));
    let code = newer.code(&SOURCES[0], (9, 0)).unwrap();
    let (none, count) = cache_of(folder.path(), None);
    assert_eq!(none.code(&SOURCES[0], (9, 0)).unwrap(), code);
    assert_eq!(none.code(&SOURCES[0], (8, 0)).err(), none.compiler.version().err(), "for another device");
    assert_eq!(none.code(&SOURCES[1], (9, 0)).err(), none.compiler.version().err(), "another source");
    assert_eq!(count.load(Ordering::Relaxed), 0);
    // An older compiler in its place: its driver may not know the newer one's code.
    let (older, count) = cache_of(folder.path(), Some((12, 4)));
    older.code(&SOURCES[0], (9, 0)).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 1);
    // A damaged file is not taken, however little else there is.
    for entry in fs::read_dir(folder.path().join("kernels")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(path, text.replace("code", "mode")).unwrap();
    }
    assert_eq!(none.code(&SOURCES[0], (9, 0)).err(), none.compiler.version().err());
}

#[test]
fn a_file_is_compiled_once_for_each_architecture() {
    let folder = tempfile::tempdir().unwrap();
    let (first, count) = cache(folder.path());
    let code = first.code(&SOURCES[0], (9, 0)).unwrap();
    assert_eq!(first.code(&SOURCES[0], (9, 0)).unwrap(), code);
    assert_eq!(count.load(Ordering::Relaxed), 1);
    let (second, count) = cache(folder.path());
    assert_eq!(second.code(&SOURCES[0], (9, 0)).unwrap(), code, "found by another process");
    assert_eq!(count.load(Ordering::Relaxed), 0);
    second.code(&SOURCES[0], (8, 0)).unwrap();
    second.code(&SOURCES[1], (9, 0)).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 2);
}

#[test]
fn a_damaged_file_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    for damage in ["", "x", "\u{e9}\u{e9}\u{e9}"] {
        let (cache, count) = cache(folder.path());
        let code = cache.code(&SOURCES[0], (9, 0)).unwrap();
        let file = fs::read_dir(folder.path().join("kernels")).unwrap().next().unwrap().unwrap().path();
        let good = fs::read_to_string(&file).unwrap();
        fs::write(&file, if damage.is_empty() { String::new() } else { format!("{good}{damage}") }).unwrap();
        let before = count.load(Ordering::Relaxed);
        assert_ne!(cache.code(&SOURCES[0], (9, 0)).unwrap(), "");
        assert_eq!(count.load(Ordering::Relaxed), before + 1);
        assert!(cache.code(&SOURCES[0], (9, 0)).unwrap().starts_with("code"), "{code}");
        assert_eq!(count.load(Ordering::Relaxed), before + 1, "repaired");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("kernels"), "a file is in the way").unwrap();
    let (cache, count) = cache(folder.path());
    cache.code(&SOURCES[0], (9, 0)).unwrap();
    cache.code(&SOURCES[0], (9, 0)).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 2);
}
