//! The kernels' sources, as they are in `kernels/cuda`, and which file has which kernel.

/// A file with kernels.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its name, such as `gemv.cu`.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Beginnings of the names of its kernels.
    kernels: &'static [&'static str],
}

macro_rules! source {
    ($file:literal, $kernels:expr) => {
        Source { file: $file, text: include_str!(concat!("../../cuda/", $file)), kernels: $kernels }
    };
}

macro_rules! header {
    ($file:literal) => {
        ($file, include_str!(concat!("../../cuda/", $file)))
    };
}

/// Every file with kernels.
pub const SOURCES: [Source; 15] = [
    source!("add.cu", &["add"]),
    source!("append.cu", &["append_"]),
    source!("attention.cu", &["attention_"]),
    source!("cells.cu", &["gather_cell_", "scatter_cell_"]),
    source!("codec.cu", &["pack_cell_", "unpack_cell_"]),
    source!("dequantise.cu", &["embed_", "dequantise_"]),
    source!("gather_rows.cu", &["gather_rows"]),
    source!("geglu.cu", &["geglu"]),
    source!("gemm.cu", &["gemm_"]),
    source!("gemv.cu", &["gemv_"]),
    source!("norm.cu", &["rms_norm", "head_norm"]),
    source!("relocate.cu", &["relocate_"]),
    source!("rope.cu", &["rope"]),
    source!("scale.cu", &["scale"]),
    source!("swiglu.cu", &["swiglu"]),
];

/// Headers that they include: name and text.
pub const HEADERS: [(&str, &str); 7] = [
    header!("attention.cuh"),
    header!("device.cuh"),
    header!("formats.cuh"),
    header!("gate.cuh"),
    header!("numbers.cuh"),
    header!("pages.cuh"),
    header!("product.cuh"),
];

/// What the compiler is told beside the architecture. Without `--fmad=false` it would fuse products and sums that are
/// written apart, and the numbers would depend on its version.
pub const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// The file that has a kernel.
pub fn source_of(kernel: &str) -> Option<&'static Source> {
    SOURCES.iter().find(|source| source.kernels.iter().any(|name| kernel.starts_with(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_here() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda");
        let mut found: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".cu") || name.ends_with(".cuh"))
            .collect();
        found.sort();
        let mut known: Vec<&str> =
            SOURCES.iter().map(|source| source.file).chain(HEADERS.iter().map(|(file, _)| *file)).collect();
        known.sort_unstable();
        assert_eq!(found, known);
    }

    #[test]
    fn kernels_are_found_by_name() {
        assert_eq!(source_of("gemv_4_q4_k").map(|source| source.file), Some("gemv.cu"));
        assert_eq!(source_of("scale_channels").map(|source| source.file), Some("scale.cu"));
        assert!(source_of("none").is_none());
    }
}
