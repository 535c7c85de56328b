//! The session-runtime command.

fn main() -> std::process::ExitCode {
    session_runtime::cli::main()
}
