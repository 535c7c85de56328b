//! Arrows between crates, as the manifests say them.

use super::{Finding, Source};

/// Crates of the workspace, and those each may depend on.
const ARROWS: [(&str, &str, &[&str]); 6] = [
    ("kernels", "kernels/Cargo.toml", &[]),
    ("store", "store/Cargo.toml", &[]),
    ("session-runtime", "session-runtime/Cargo.toml", &["kernels", "store"]),
    ("tools-sdk-macros", "tools-sdk/macros/Cargo.toml", &[]),
    ("tools-sdk", "tools-sdk/Cargo.toml", &["tools-sdk-macros"]),
    ("xtask", "xtask/Cargo.toml", &[]),
];

/// Checks the manifests of the workspace.
pub(crate) fn check(sources: &[Source], findings: &mut Vec<Finding>) {
    for (name, path, allowed) in ARROWS {
        let Some(source) = sources.iter().find(|source| source.path == path) else { continue };
        for (line, dependency) in dependencies(&source.text) {
            let ours = ARROWS.iter().any(|(other, ..)| *other == dependency);
            if ours && dependency != name && !allowed.contains(&dependency.as_str()) {
                findings.push(Finding::new(
                    path,
                    line,
                    format!("`{name}` must not depend on `{dependency}`"),
                ));
            }
        }
    }
}

/// Names under the tables of dependencies that are built into the crate, with their lines.
fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut inside = false;
    let mut found = Vec::new();
    for (line, number) in manifest.lines().map(str::trim).zip(1..) {
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_end_matches(']');
            inside = table.ends_with("dependencies") && !table.ends_with("dev-dependencies");
        } else if inside {
            let name: String =
                line.chars().take_while(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect();
            if !name.is_empty() {
                found.push((number, name));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_dependency_is_found_and_a_test_dependency_is_not() {
        let text = "[dependencies]\nblake3 = \"1\"\nstore.workspace = true\n\n[dev-dependencies]\nsession-runtime = {}\n";
        let source = Source { path: "kernels/Cargo.toml".to_owned(), text: text.to_owned() };
        let mut findings = Vec::new();
        check(&[source], &mut findings);
        assert_eq!(findings, [Finding::new("kernels/Cargo.toml", 3, "`kernels` must not depend on `store`")]);
    }
}
