use super::*;

#[test]
fn the_program_of_a_test_is_read_from_what_cargo_says() {
    let said = "   Compiling kernels v0.1.0\n  Executable tests/cuda_model.rs (/t/deps/cuda_model-1f)\n\
                \x20 Executable tests/cuda_kernels.rs (/t/deps/cuda_kernels-2a)\n";
    assert_eq!(executable(said, "cuda_kernels"), Some(PathBuf::from("/t/deps/cuda_kernels-2a")));
    assert_eq!(executable(said, "cuda_attention"), None);
}
