//! The CUDA kernels without a GPU: every one is compiled by NVRTC, as the product does it, and assembled by ptxas for
//! three architectures. None may spill registers, and what each takes is compared with a committed table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::process::{Failure, cargo, output, root, run as run_process, target_dir};
use crate::python::COMPILERS;

/// Compute capabilities that kernels are checked for.
pub(crate) const ARCHITECTURES: [&str; 3] = ["80", "90", "100"];
/// The table, from the root of the workspace.
const TABLE: &str = "kernels/cuda/resources.txt";
/// Folders and files that decide what comes out.
const INPUTS: [&str; 6] = [
    "kernels/cuda",
    "kernels/src/cuda/nvrtc.rs",
    "kernels/src/cuda/sources.rs",
    "kernels/examples/ptx.rs",
    "xtask/src/kernels.rs",
    "xtask/src/python.rs",
];

#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Write the table of registers and shared memory as it is found, after a look at what changed
    #[arg(long)]
    write: bool,
}

/// What a kernel takes of a multiprocessor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Resources {
    /// Registers of a thread.
    registers: u32,
    /// Bytes of shared memory of a block.
    shared: u32,
    /// Bytes that a thread keeps in memory because registers did not suffice.
    spilled: u32,
}

/// By kernel and architecture.
type Table = BTreeMap<String, BTreeMap<&'static str, Resources>>;

/// NVRTC's library and the program ptxas.
pub(crate) struct Compilers {
    pub(crate) nvrtc: PathBuf,
    ptxas: PathBuf,
}

/// Brings the compilers where they are missing.
pub(crate) fn compilers() -> Result<Compilers, Failure> {
    let python = COMPILERS.make().map_err(|why| {
        Failure::Other(format!(
            "checking the CUDA kernels needs NVRTC and ptxas, two Python packages of 130 MB that are fetched once: {why}"
        ))
    })?;
    let site = output(
        Command::new(&python).args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]),
        "asking Python for its packages",
    )?;
    let packages = Path::new(site.trim()).join("nvidia");
    let nvrtc = packages.join("cuda_nvrtc/lib/libnvrtc.so.12");
    let ptxas = packages.join("cuda_nvcc/bin/ptxas");
    if let Some(missing) = [&nvrtc, &ptxas].into_iter().find(|file| !file.is_file()) {
        return Err(Failure::Other(format!("the packages have no {}", missing.display())));
    }
    Ok(Compilers { nvrtc, ptxas })
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    check(&compilers()?, options)
}

/// Compiles, assembles and compares; nothing where these very sources passed before.
pub(crate) fn check(compilers: &Compilers, options: &Options) -> Result<(), Failure> {
    let folder = target_dir().join("cuda-kernels");
    let stamp = folder.join("passed");
    let digest = digest()?;
    if !options.write && fs::read_to_string(&stamp).is_ok_and(|passed| passed == digest) {
        println!("kernels: unchanged since they passed");
        return Ok(());
    }
    fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
    let mut compile = cargo();
    compile.args(["run", "--quiet", "--package", "kernels", "--example", "ptx", "--"]);
    compile.arg(&compilers.nvrtc).arg(&folder).args(ARCHITECTURES);
    run_process(&mut compile, "compiling the kernels with NVRTC")?;
    let mut table = Table::new();
    for file in sources()? {
        for architecture in ARCHITECTURES {
            assemble(compilers, &folder, &file, architecture, &mut table)?;
        }
    }
    let spilling: Vec<String> = spills(&table).collect();
    if !spilling.is_empty() {
        return Err(Failure::Other(format!("kernels spill registers to memory: {}", spilling.join(", "))));
    }
    let found = write_table(&table);
    let path = root().join(TABLE);
    if options.write {
        fs::write(&path, &found).map_err(Failure::file(&path))?;
        println!("kernels: {TABLE} is written");
    } else {
        compare(&fs::read_to_string(&path).unwrap_or_default(), &found)?;
    }
    fs::write(&stamp, self::digest()?).map_err(Failure::file(&stamp))?;
    println!("kernels: {} kernels for {} architectures, no spills", table.len(), ARCHITECTURES.len());
    Ok(())
}

/// Stems of the files with kernels.
fn sources() -> Result<Vec<String>, Failure> {
    let folder = root().join("kernels/cuda");
    let mut stems = Vec::new();
    for entry in fs::read_dir(&folder).map_err(Failure::file(&folder))? {
        let name = entry.map_err(Failure::file(&folder))?.file_name().to_string_lossy().into_owned();
        stems.extend(name.strip_suffix(".cu").map(str::to_owned));
    }
    stems.sort();
    Ok(stems)
}

/// Instructions that no kernel may have: those that are not exact, and those whose order is a race.
fn forbidden(code: &str) -> Option<&str> {
    let bad = |word: &&str| {
        let inexact = word.contains(".approx") || word.contains(".ftz");
        inexact || word.starts_with("atom.") || word.starts_with("red.")
    };
    code.split_whitespace().find(bad)
}

/// Assembles one file for one architecture and adds what its kernels take.
fn assemble(
    compilers: &Compilers,
    folder: &Path,
    file: &str,
    architecture: &'static str,
    table: &mut Table,
) -> Result<(), Failure> {
    let code = folder.join(format!("{file}.compute_{architecture}.ptx"));
    let text = fs::read_to_string(&code).map_err(Failure::file(&code))?;
    if let Some(instruction) = forbidden(&text) {
        return Err(Failure::Other(format!(
            "{file}.cu has {instruction}, which does not give the same bits always"
        )));
    }
    let mut ptxas = Command::new(&compilers.ptxas);
    ptxas.args(["-v", &format!("-arch=sm_{architecture}"), "-o"]);
    ptxas.arg(folder.join("assembled.cubin")).arg(&code);
    let done = ptxas.output().map_err(|source| Failure::Start { program: "ptxas".to_owned(), source })?;
    let said = String::from_utf8_lossy(&done.stderr);
    if !done.status.success() {
        let what = format!("assembling {file}.cu for sm_{architecture}: {}", said.trim());
        return Err(Failure::Exit { what, status: done.status.to_string() });
    }
    let found = resources(&said);
    if found.is_empty() {
        return Err(Failure::Other(format!("ptxas tells nothing about {file}.cu: {}", said.trim())));
    }
    for (kernel, resources) in found {
        table.entry(kernel).or_default().insert(architecture, resources);
    }
    Ok(())
}

/// What `ptxas -v` says about each kernel.
fn resources(said: &str) -> Vec<(String, Resources)> {
    let mut found: Vec<(String, Resources)> = Vec::new();
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or(rest);
            found.push((name.to_owned(), Resources::default()));
        } else if let Some((_, resources)) = found.last_mut() {
            let number = |mark: &str| number_before(line, mark);
            if line.contains("bytes stack frame") {
                let spilled = ["bytes stack frame", "bytes spill stores", "bytes spill loads"];
                resources.spilled = spilled.iter().filter_map(|mark| number(mark)).sum();
            } else if line.contains("Used ") {
                resources.registers = number("registers").unwrap_or(0);
                resources.shared = number("bytes smem").unwrap_or(0);
            }
        }
    }
    found
}

/// The number in front of `mark`.
fn number_before(line: &str, mark: &str) -> Option<u32> {
    line.split_once(mark)?.0.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Kernels that spill.
fn spills(table: &Table) -> impl Iterator<Item = String> {
    table.iter().flat_map(|(kernel, by)| {
        by.iter().filter(|(_, resources)| resources.spilled > 0).map(move |(architecture, resources)| {
            format!("{kernel} on sm_{architecture} ({} bytes)", resources.spilled)
        })
    })
}

/// The table as a file.
fn write_table(table: &Table) -> String {
    let mut text = String::from(
        "# Registers of a thread and bytes of shared memory of a block, as ptxas 12.8 gives them out; nothing spills.\n\
         # `cargo xtask kernels` compares, `cargo xtask kernels --write` writes.\n",
    );
    let _ = write!(text, "{:<24}", "# kernel");
    ARCHITECTURES.iter().for_each(|architecture| {
        let _ = write!(text, "  {:>12}", format!("sm_{architecture}"));
    });
    text.push('\n');
    for (kernel, by) in table {
        let _ = write!(text, "{kernel:<24}");
        for resources in ARCHITECTURES.iter().map(|architecture| by.get(architecture)) {
            let cell = resources.map_or_else(String::new, |r| format!("{} / {}", r.registers, r.shared));
            let _ = write!(text, "  {cell:>12}");
        }
        text.push('\n');
    }
    text
}

/// Refuses a difference, by its lines.
fn compare(committed: &str, found: &str) -> Result<(), Failure> {
    if committed == found {
        return Ok(());
    }
    let lines = |text: &str, other: &str, sign: &str| {
        let other: Vec<&str> = other.lines().collect();
        let only: Vec<&str> = text.lines().filter(|line| !other.contains(line)).collect();
        only.iter().map(|line| format!("\n{sign} {line}")).collect::<String>()
    };
    Err(Failure::Other(format!(
        "{TABLE} does not fit what ptxas gives out; look at the difference, then run `cargo xtask kernels --write`:{}{}",
        lines(committed, found, "-"),
        lines(found, committed, "+"),
    )))
}

/// Of all that decides the outcome.
fn digest() -> Result<String, Failure> {
    let mut files = Vec::new();
    for input in INPUTS.map(|input| root().join(input)) {
        if input.is_dir() {
            for entry in fs::read_dir(&input).map_err(Failure::file(&input))? {
                files.push(entry.map_err(Failure::file(&input))?.path());
            }
        } else {
            files.push(input);
        }
    }
    files.retain(|file| file.is_file());
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(file.to_string_lossy().as_bytes()).update(&[0]);
        hasher.update(&fs::read(&file).map_err(Failure::file(&file))?).update(&[0]);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm_f32' for 'sm_90'
ptxas info    : Function properties for gemm_f32
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers, 16384 bytes smem
ptxas info    : Compile time = 26.000 ms
ptxas info    : Compiling entry function 'add' for 'sm_90'
ptxas info    : Function properties for add
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
";

    fn table() -> Table {
        let mut table = Table::new();
        for (kernel, resources) in resources(SAID) {
            table.entry(kernel).or_default().insert("90", resources);
        }
        table
    }

    #[test]
    fn what_ptxas_says_is_read() {
        let found = resources(SAID);
        let gemm = Resources { registers: 70, shared: 16384, spilled: 0 };
        let add = Resources { registers: 10, shared: 0, spilled: 36 };
        assert_eq!(found, [("gemm_f32".to_owned(), gemm), ("add".to_owned(), add)]);
        assert_eq!(spills(&table()).collect::<Vec<_>>(), ["add on sm_90 (36 bytes)"]);
    }

    #[test]
    fn instructions_that_are_not_exact_are_found() {
        assert_eq!(forbidden("ld.shared.f32 %f1, [a]; fma.rn.f32 %f1, %f2; div.rn.f32 %f3;"), None);
        assert_eq!(forbidden("mul.f32 %f1; ex2.approx.ftz.f32 %f1, %f2;"), Some("ex2.approx.ftz.f32"));
        assert_eq!(forbidden("red.global.add.f32 [a], %f2;"), Some("red.global.add.f32"));
    }

    #[test]
    fn a_difference_is_told_by_its_lines() {
        let found = write_table(&table());
        assert!(compare(&found, &found).is_ok());
        let old = found.replace("70 / 16384", "64 / 16384");
        let error = compare(&old, &found).unwrap_err().to_string();
        let signs: Vec<&str> = error.lines().skip(1).map(|line| &line[..10]).collect();
        assert_eq!(signs, ["- gemm_f32", "+ gemm_f32"], "{error}");
        assert!(compare("", &found).is_err());
    }
}
