//! Compiled kernels on disk, found by a digest of everything that makes them what they are.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::DeviceError;
use super::nvrtc::Compiler;
use super::sources::{HEADERS, OPTIONS, Source};

/// Length of a digest in hex.
const HEX: usize = 64;

/// A folder of compiled kernels in front of a compiler.
///
/// A file begins with the digest of what follows. One that does not fit it is compiled again and replaced; a folder that
/// cannot be written to is no error, only slow. Nothing is ever deleted: a version of the kernels takes less than two
/// megabytes.
pub struct Cache {
    folder: Option<PathBuf>,
    compiler: Box<dyn Compiler>,
}

impl Cache {
    /// Without a folder everything is compiled when it is first used.
    pub fn new(folder: Option<PathBuf>, compiler: Box<dyn Compiler>) -> Self {
        Self { folder, compiler }
    }

    /// PTX of a file.
    ///
    /// # Errors
    /// It is not in the cache and does not compile.
    pub fn code(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError> {
        let path = self.folder.as_ref().map(|folder| folder.join(file_name(source, capability)));
        if let Some(code) = path.as_deref().and_then(read) {
            return Ok(code);
        }
        let code = self.compiler.compile(source, capability)?;
        if let Some(path) = path {
            write(&path, &code);
        }
        Ok(code)
    }
}

/// Name and digest of a file, its headers, the options and the architecture. The compiler's version is not part of it:
/// any version's code gives the same numbers.
fn file_name(source: &Source, (major, minor): (u32, u32)) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    };
    add(source.text);
    HEADERS.iter().for_each(|(name, text)| {
        add(name);
        add(text);
    });
    OPTIONS.iter().for_each(|option| add(option));
    let stem = source.file.trim_end_matches(".cu");
    format!("{stem}-compute_{major}{minor}-{}.ptx", &hasher.finalize().to_hex()[..32])
}

fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let (digest, code) = text.split_at_checked(HEX)?;
    let code = code.strip_prefix('\n')?;
    (blake3::hash(code.as_bytes()).to_hex().as_str() == digest).then(|| code.to_string())
}

/// Writes beside and renames, so that no one reads half a file.
fn write(path: &Path, code: &str) {
    let Some(folder) = path.parent() else { return };
    let beside = path.with_extension(format!("{}.part", std::process::id()));
    let text = format!("{}\n{code}", blake3::hash(code.as_bytes()).to_hex());
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&beside, text));
    if written.and_then(|()| fs::rename(&beside, path)).is_err() {
        // A cache that is not there costs the next start some seconds, no more.
        let _ = fs::remove_file(&beside);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::sources::SOURCES;
    use super::*;

    struct Counting(Arc<AtomicUsize>);

    impl Compiler for Counting {
        fn compile(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError> {
            let count = self.0.fetch_add(1, Ordering::Relaxed);
            Ok(format!("code {count} of {} for {}.{}\n", source.file, capability.0, capability.1))
        }
    }

    fn cache(folder: &Path) -> (Cache, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        (Cache::new(Some(folder.join("kernels")), Box::new(Counting(count.clone()))), count)
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
            fs::write(&file, if damage.is_empty() { String::new() } else { format!("{good}{damage}") })
                .unwrap();
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
}
