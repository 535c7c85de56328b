//! The rules of this repository that the compiler does not know. Each check is a module that turns files into
//! findings; nothing here changes a file except `--pin`, which writes the digests of formats.

mod arrows;
mod formats;
mod manifests;
mod sizes;
mod words;

use std::fmt;
use std::fs;
use std::path::PathBuf;

use clap::Args;

use crate::process::{Failure, output, root};

#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Write the digests of WIT and on-disk formats into their documents, after describing the change there
    #[arg(long)]
    pin: bool,
}

/// A file of the repository, as text.
pub(crate) struct Source {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl Source {
    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// Something that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(crate) path: String,
    /// From 1; 0 is the whole file.
    pub(crate) line: usize,
    pub(crate) what: String,
}

impl Finding {
    pub(crate) fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}: {}", self.path, self.what)
        } else {
            write!(f, "{}:{}: {}", self.path, self.line, self.what)
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let mut sources = self::sources()?;
    if options.pin {
        formats::pin(&sources)?;
        sources = self::sources()?;
    }
    let mut findings = Vec::new();
    for source in &sources {
        words::check(source, &mut findings);
        sizes::check(source, &mut findings);
        if source.is_rust() {
            match syn::parse_file(&source.text) {
                Ok(file) => {
                    arrows::check(source, &file, &mut findings);
                    sizes::check_functions(source, &file, &mut findings);
                }
                Err(error) => {
                    findings.push(Finding::new(&source.path, 0, format!("does not parse: {error}")))
                }
            }
        }
    }
    manifests::check(&sources, &mut findings);
    formats::check(&sources, &mut findings);
    findings.sort();
    findings.dedup();
    for finding in &findings {
        eprintln!("tidy: {finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: {} files, nothing to say", sources.len());
            Ok(())
        }
        1 => Err(Failure::Other("tidy: 1 finding".to_owned())),
        count => Err(Failure::Other(format!("tidy: {count} findings"))),
    }
}

/// Every text file that git knows or would know.
fn sources() -> Result<Vec<Source>, Failure> {
    let root = root();
    let mut git = std::process::Command::new("git");
    git.current_dir(&root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let list = output(&mut git, "listing files with git")?;
    let mut sources = Vec::new();
    let mut paths: Vec<&str> = list.split('\0').filter(|path| !path.is_empty()).collect();
    paths.sort_unstable();
    paths.dedup();
    for path in paths {
        let file: PathBuf = root.join(path);
        // A file that git still lists may be gone from the folder.
        if !file.is_file() {
            continue;
        }
        let bytes = fs::read(&file).map_err(Failure::file(&file))?;
        if bytes.contains(&0) {
            continue;
        }
        if let Ok(text) = String::from_utf8(bytes) {
            sources.push(Source { path: path.to_owned(), text });
        }
    }
    Ok(sources)
}
