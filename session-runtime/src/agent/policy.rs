//! The one gate (invariant I7): whatever a guest may reach of the world goes through a [`Policy`] made from
//! the session's grants and from what the tool said it wants. Default is deny. Knows no wasmtime.
//!
//! A path is walked one name at a time with `openat` relative to the granted directory, and no symbolic
//! link is ever followed. So neither `..` nor a link nor a directory moved meanwhile leads outside.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::failure::tool_failure;
use super::limits::GuestLimits;
use crate::error::{Error, ErrorKind};
use crate::session::spec::FileGrant;
use crate::session::tool::ToolFailure;

const PATH_BYTES: usize = 4096;
const PATH_NAMES: usize = 64;
const GRANTS: usize = 32;
/// The word by which a tool asks for files.
pub(super) const FILES: &str = "files";

/// What one call may reach.
#[derive(Debug)]
pub struct Policy {
    grants: Vec<FileGrant>,
    read_bytes: u64,
    list_entries: usize,
    denials: Arc<AtomicU64>,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// Name inside the directory.
    pub name: String,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Bytes of a file; 0 for a directory.
    pub size: u64,
}

/// Checks the grants of a new session: names are words, directories exist and lie inside one of `roots`.
/// Without roots nothing may be granted.
///
/// # Errors
/// `grant_invalid`, `grant_duplicate`, `grant_not_found` or `grant_outside_roots`, naming the grant.
pub fn check_grants(grants: &[FileGrant], roots: &[PathBuf]) -> Result<(), Error> {
    if grants.len() > GRANTS {
        let message = format!("a session has at most {GRANTS} grants, not {}", grants.len());
        return Err(Error::new(ErrorKind::Limit, "too_many_grants", message));
    }
    for (index, grant) in grants.iter().enumerate() {
        let name = &grant.name;
        if !crate::ids::is_valid(name) {
            let message = format!("grant name {name:?} must be 1 to 64 characters of [A-Za-z0-9_.-]");
            return Err(Error::invalid("grant_invalid", message));
        }
        if grants.iter().take(index).any(|earlier| earlier.name == *name) {
            return Err(Error::invalid("grant_duplicate", format!("grant '{name}' is given twice")));
        }
        let path = Path::new(&grant.path);
        if !path.is_absolute() {
            let message = format!("grant '{name}': '{}' must be an absolute path", grant.path);
            return Err(Error::invalid("grant_invalid", message));
        }
        // Where nothing may be granted, nothing is told of what exists.
        let real = path.canonicalize();
        let place = real.as_deref().unwrap_or(path);
        let outside = path.components().any(|part| part == Component::ParentDir)
            || !roots.iter().filter_map(|root| root.canonicalize().ok()).any(|root| place.starts_with(root));
        if outside {
            let message = format!(
                "grant '{name}': '{0}' lies in no directory that the operator allows: start the server with \
                 `serve --grant-root {0}`, or list it in the library's grant_roots",
                grant.path
            );
            return Err(Error::new(ErrorKind::Denied, "grant_outside_roots", message));
        }
        if !place.is_dir() {
            let message = format!("grant '{name}': there is no directory '{}'", grant.path);
            return Err(Error::not_found("grant_not_found", message));
        }
    }
    Ok(())
}

impl Policy {
    /// The policy of one call: the session's grants, for a tool that said it wants files; nothing else.
    pub fn new(
        grants: &[FileGrant],
        wants: &[String],
        limits: &GuestLimits,
        denials: Arc<AtomicU64>,
    ) -> Self {
        let wanted = wants.iter().any(|want| want == FILES);
        Self {
            grants: if wanted { grants.to_vec() } else { Vec::new() },
            read_bytes: limits.read_bytes,
            list_entries: limits.list_entries as usize,
            denials,
        }
    }

    /// A policy that denies everything.
    pub fn nothing(limits: &GuestLimits) -> Self {
        Self::new(&[], &[], limits, Arc::default())
    }

    /// The grants, as guests see them: name and whether it may be written.
    pub fn grants(&self) -> Vec<(String, bool)> {
        self.grants.iter().map(|grant| (grant.name.clone(), grant.writable)).collect()
    }

    /// Entries of a directory in name order. Symbolic links, special files and names that are not UTF-8
    /// cannot be opened and are not shown.
    ///
    /// # Errors
    /// Denied (`grant_unknown`, `path_absolute`, `path_escapes`, `path_invalid`, `path_symlink`,
    /// `path_special`), `path_not_found`, `not_a_directory`, `too_many_entries`, `io`.
    pub fn list(&self, grant: &str, path: &str) -> Result<Vec<DirectoryEntry>, ToolFailure> {
        // One slash at the end of a directory's path is how people write it; names are walked without it.
        let names =
            self.names(path.strip_suffix('/').filter(|rest| !rest.is_empty()).unwrap_or(path), path)?;
        let mut directory = self.root(grant)?;
        for name in &names {
            directory = self.enter(&directory, name, path)?;
        }
        let mut entries = Vec::new();
        let io = |error| self.failed(path, error);
        for entry in Dir::read_from(&directory).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            // An entry may vanish between being read and being looked at.
            let Ok(stat) = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let Ok(name) = name.to_str() else { continue };
            let is_directory = match kind(&stat) {
                FileType::Directory => true,
                FileType::RegularFile => false,
                _ => continue,
            };
            if entries.len() >= self.list_entries {
                let message = format!("'{path}' has more than {} entries", self.list_entries);
                return Err(tool_failure("limit", "too_many_entries", message));
            }
            let size = if is_directory { 0 } else { u64::try_from(stat.st_size).unwrap_or(0) };
            entries.push(DirectoryEntry { name: name.to_owned(), is_directory, size });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// At most `length` bytes of a file from `offset`; fewer where it ends or at the host's limit of one read.
    ///
    /// # Errors
    /// Those of [`Policy::list`], and `is_a_directory`.
    pub fn read(&self, grant: &str, path: &str, offset: u64, length: u64) -> Result<Vec<u8>, ToolFailure> {
        let names = self.names(path, path)?;
        let mut directory = self.root(grant)?;
        let Some((last, parents)) = names.split_last() else {
            return Err(tool_failure("invalid_input", "is_a_directory", "the path names no file"));
        };
        for name in parents {
            directory = self.enter(&directory, name, path)?;
        }
        let file = self.open(&directory, last, path)?;
        let size = file.metadata().map_err(|error| self.io(path, &error))?.len();
        let length = length.min(self.read_bytes).min(size.saturating_sub(offset));
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        let mut done = 0;
        while done < bytes.len() {
            match file.read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.io(path, &error)),
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }

    fn root(&self, name: &str) -> Result<OwnedFd, ToolFailure> {
        let Some(grant) = self.grants.iter().find(|grant| grant.name == name) else {
            let known: Vec<&str> = self.grants.iter().map(|grant| grant.name.as_str()).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            return Err(self.deny(name, "grant_unknown", &format!("no such grant; granted: {known}")));
        };
        // Links in the operator's own path are followed: it is the operator who named it.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(grant.path.as_str(), flags, Mode::empty()).map_err(|error| self.failed(name, error))
    }

    /// Splits a relative path into names. `shown` is the path as the guest gave it.
    fn names<'a>(&self, path: &'a str, shown: &str) -> Result<Vec<&'a str>, ToolFailure> {
        if path.contains('\0') {
            return Err(self.deny(shown, "path_invalid", "paths have no NUL"));
        }
        if path.len() > PATH_BYTES {
            return Err(self.deny("", "path_invalid", "the path is too long"));
        }
        if path.starts_with('/') {
            return Err(self.deny(shown, "path_absolute", "paths are relative to the grant"));
        }
        if path.is_empty() || path == "." {
            return Ok(Vec::new());
        }
        let mut names = Vec::new();
        for name in path.split('/') {
            match name {
                "" => return Err(self.deny(shown, "path_invalid", "a name in the path is empty")),
                ".." => return Err(self.deny(shown, "path_escapes", "`..` is not allowed")),
                "." => {}
                name => names.push(name),
            }
        }
        if names.len() > PATH_NAMES {
            return Err(self.deny(shown, "path_invalid", "the path has too many names"));
        }
        Ok(names)
    }

    /// Opens a directory inside a directory, without following a link.
    fn enter(&self, directory: &OwnedFd, name: &str, path: &str) -> Result<OwnedFd, ToolFailure> {
        match self.look(directory, name, path)? {
            FileType::Directory => {}
            _ => {
                let message = format!("'{}' in '{}' is not a directory", shown(name), shown(path));
                return Err(tool_failure("invalid_input", "not_a_directory", message));
            }
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(directory, OsStr::new(name), flags, Mode::empty())
            .map_err(|error| self.failed(path, error))
    }

    /// Opens a regular file for reading, without following a link and without waiting for a pipe's writer.
    fn open(&self, directory: &OwnedFd, name: &str, path: &str) -> Result<File, ToolFailure> {
        match self.look(directory, name, path)? {
            FileType::RegularFile => {}
            FileType::Directory => {
                let message = format!("'{}' is a directory", shown(path));
                return Err(tool_failure("invalid_input", "is_a_directory", message));
            }
            _ => return Err(self.deny(path, "path_special", "not a regular file")),
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, OsStr::new(name), flags, Mode::empty())
            .map_err(|error| self.failed(path, error))?;
        // It may have been replaced since it was looked at.
        let stat = rustix::fs::fstat(&file).map_err(|error| self.failed(path, error))?;
        if kind(&stat) != FileType::RegularFile {
            return Err(self.deny(path, "path_special", "not a regular file"));
        }
        Ok(File::from(file))
    }

    fn look(&self, directory: &OwnedFd, name: &str, path: &str) -> Result<FileType, ToolFailure> {
        let stat = rustix::fs::statat(directory, OsStr::new(name), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| self.failed(path, error))?;
        match kind(&stat) {
            FileType::Symlink => Err(self.deny(path, "path_symlink", "symbolic links are not followed")),
            kind => Ok(kind),
        }
    }

    fn deny(&self, path: &str, code: &str, why: &str) -> ToolFailure {
        self.denials.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(code, path = %shown(path), "file access denied");
        tool_failure("denied", code, format!("'{}': {why}", shown(path)))
    }

    fn failed(&self, path: &str, error: Errno) -> ToolFailure {
        match error {
            Errno::NOENT => {
                tool_failure("not_found", "path_not_found", format!("there is no '{}'", shown(path)))
            }
            Errno::NOTDIR => {
                let message = format!("'{}' is not a directory", shown(path));
                tool_failure("invalid_input", "not_a_directory", message)
            }
            // A link put in place between looking and opening.
            Errno::LOOP => self.deny(path, "path_symlink", "symbolic links are not followed"),
            Errno::ACCESS | Errno::PERM => self.deny(path, "path_forbidden", "the host may not read it"),
            Errno::NAMETOOLONG => self.deny(path, "path_invalid", "a name is too long"),
            error => self.io(path, &error.into()),
        }
    }

    fn io(&self, path: &str, error: &std::io::Error) -> ToolFailure {
        tracing::warn!(path = %shown(path), %error, "file access failed");
        tool_failure("failed", "io", format!("'{}': {}", shown(path), error.kind()))
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn shown(path: &str) -> String {
    super::failure::scrub(path, 256)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Place {
        directory: tempfile::TempDir,
        policy: Policy,
        denials: Arc<AtomicU64>,
    }

    /// `granted/` with a file, a folder, links out of it and a pipe, beside `secret.txt`.
    fn place() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let granted = directory.path().join("granted");
        std::fs::create_dir_all(granted.join("folder")).unwrap();
        std::fs::write(directory.path().join("secret.txt"), "secret").unwrap();
        std::fs::write(granted.join("note.txt"), "hello world").unwrap();
        std::fs::write(granted.join("folder/inner.txt"), "inner").unwrap();
        symlink(directory.path().join("secret.txt"), granted.join("link.txt")).unwrap();
        symlink("..", granted.join("up")).unwrap();
        symlink("note.txt", granted.join("inside.txt")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            granted.join("pipe"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        let denials = Arc::new(AtomicU64::new(0));
        let grants =
            [FileGrant { name: "docs".into(), path: granted.to_str().unwrap().into(), writable: false }];
        let policy = Policy::new(&grants, &[FILES.to_owned()], &GuestLimits::default(), Arc::clone(&denials));
        Place { directory, policy, denials }
    }

    fn code(result: Result<Vec<u8>, ToolFailure>) -> String {
        result.unwrap_err().code
    }

    #[test]
    fn granted_files_are_read_and_listed() {
        let place = place();
        let policy = &place.policy;
        assert_eq!(policy.read("docs", "note.txt", 0, 100).unwrap(), b"hello world");
        assert_eq!(policy.read("docs", "note.txt", 6, 3).unwrap(), b"wor");
        assert_eq!(policy.read("docs", "note.txt", 100, 3).unwrap(), b"");
        assert_eq!(policy.read("docs", "note.txt", u64::MAX, u64::MAX).unwrap(), b"");
        assert_eq!(policy.read("docs", "./folder/./inner.txt", 0, 100).unwrap(), b"inner");
        let names: Vec<String> = policy.list("docs", "").unwrap().into_iter().map(|e| e.name).collect();
        assert_eq!(names, ["folder", "note.txt"]);
        let inner = [DirectoryEntry { name: "inner.txt".into(), is_directory: false, size: 5 }];
        assert_eq!(policy.list("docs", "folder").unwrap(), inner);
        assert_eq!(policy.list("docs", "folder/").unwrap(), inner);
        assert_eq!(place.denials.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn i7_no_path_leads_out_of_the_grant() {
        let place = place();
        let absolute = place.directory.path().join("secret.txt");
        let long = "a/".repeat(3000);
        let deep = "a/".repeat(100);
        let cases = [
            ("../secret.txt", "path_escapes"),
            ("folder/../../secret.txt", "path_escapes"),
            ("folder/..", "path_escapes"),
            ("..", "path_escapes"),
            (absolute.to_str().unwrap(), "path_absolute"),
            ("/etc/passwd", "path_absolute"),
            ("//etc/passwd", "path_absolute"),
            ("link.txt", "path_symlink"),
            ("inside.txt", "path_symlink"),
            ("up/secret.txt", "path_symlink"),
            ("up", "path_symlink"),
            ("note.txt/", "path_invalid"),
            ("link.txt/", "path_invalid"),
            ("folder//inner.txt", "path_invalid"),
            ("note.txt\0.png", "path_invalid"),
            ("pipe", "path_special"),
            (long.as_str(), "path_invalid"),
            (deep.as_str(), "path_invalid"),
        ];
        for (index, (path, expected)) in cases.iter().enumerate() {
            assert_eq!(code(place.policy.read("docs", path, 0, 10)), *expected, "{path:?}");
            assert_eq!(place.denials.load(Ordering::Relaxed), index as u64 + 1, "{path:?}");
        }
        for (path, expected) in
            [("..", "path_escapes"), ("up", "path_symlink"), ("up/", "path_symlink"), ("/", "path_absolute")]
        {
            assert_eq!(place.policy.list("docs", path).unwrap_err().code, expected, "{path:?}");
        }
    }

    #[test]
    fn i7_only_named_grants_of_a_tool_that_wants_files() {
        let place = place();
        assert_eq!(code(place.policy.read("other", "note.txt", 0, 10)), "grant_unknown");
        assert_eq!(code(place.policy.read("", "note.txt", 0, 10)), "grant_unknown");
        let quiet = Policy::new(&place.policy.grants, &[], &GuestLimits::default(), Arc::default());
        assert_eq!(quiet.grants(), []);
        assert_eq!(code(quiet.read("docs", "note.txt", 0, 10)), "grant_unknown");
        assert_eq!(quiet.list("docs", "").unwrap_err().kind, "denied");
    }

    #[test]
    fn what_is_not_there_is_said() {
        let place = place();
        assert_eq!(code(place.policy.read("docs", "none.txt", 0, 10)), "path_not_found");
        assert_eq!(code(place.policy.read("docs", "folder", 0, 10)), "is_a_directory");
        assert_eq!(code(place.policy.read("docs", "", 0, 10)), "is_a_directory");
        assert_eq!(code(place.policy.read("docs", "note.txt/x", 0, 10)), "not_a_directory");
        assert_eq!(place.policy.list("docs", "note.txt").unwrap_err().code, "not_a_directory");
    }

    #[test]
    fn i8_reads_and_listings_are_bounded() {
        let place = place();
        let limits = GuestLimits { read_bytes: 4, list_entries: 1, ..Default::default() };
        let policy = Policy::new(&place.policy.grants, &[FILES.to_owned()], &limits, Arc::default());
        assert_eq!(policy.read("docs", "note.txt", 0, u64::MAX).unwrap(), b"hell");
        assert_eq!(policy.list("docs", "").unwrap_err().code, "too_many_entries");
    }

    #[test]
    fn i7_grants_lie_inside_the_operators_roots() {
        let place = place();
        let grants = &place.policy.grants;
        let inside = [place.directory.path().to_owned()];
        let outside = [place.directory.path().join("granted/folder")];
        assert!(check_grants(grants, &inside).is_ok());
        let refused = check_grants(grants, &[]).unwrap_err();
        assert_eq!((refused.kind, &*refused.code), (ErrorKind::Denied, "grant_outside_roots"));
        assert!(refused.message.contains(&format!("--grant-root {}", grants[0].path)), "{refused}");
        assert_eq!(check_grants(grants, &outside).unwrap_err().code, "grant_outside_roots");
        let escape = FileGrant {
            path: place.directory.path().join("granted/up").to_str().unwrap().into(),
            ..grants[0].clone()
        };
        assert_eq!(
            check_grants(&[escape], &[place.directory.path().join("granted")]).unwrap_err().code,
            "grant_outside_roots"
        );
        let twice = [grants[0].clone(), grants[0].clone()];
        assert_eq!(check_grants(&twice, &inside).unwrap_err().code, "grant_duplicate");
        let missing = |path: &str| {
            let path = place.directory.path().join(path).to_str().unwrap().to_owned();
            let grants = [FileGrant { path, ..grants[0].clone() }];
            check_grants(&grants, &inside).unwrap_err().code
        };
        assert_eq!(missing("nowhere"), "grant_not_found");
        assert_eq!(missing("secret.txt"), "grant_not_found");
        assert_eq!(missing("granted/../../nowhere"), "grant_outside_roots");
    }
}
