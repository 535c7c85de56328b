//! Arrows between modules of session-runtime point one way, and some crates are known to one module only.
//!
//! `api, cli -> agent -> session -> scheduler -> {kv, restore} -> engine -> models`

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::{Finding, Source};

/// Where the checked modules are.
const HOST: &str = "session-runtime/src/";

/// Modules by height; a module may use those below it. `config` and `runtime` put the parts together and are
/// what `api` and `cli` are given. Modules that are not here may be used by all, and use none of these.
const HEIGHTS: [(&str, usize); 12] = [
    ("models", 1),
    ("engine", 2),
    ("kv", 3),
    ("restore", 4),
    ("scheduler", 5),
    ("session", 6),
    ("agent", 7),
    ("config", 8),
    ("runtime", 9),
    ("api", 10),
    ("bench", 10),
    ("cli", 11),
];

/// Crates that only code below certain paths may name.
const OWNED: [(&str, &[&str]); 12] = [
    ("sled", &["store/"]),
    ("cudarc", &["kernels/"]),
    ("zstd", &["kernels/"]),
    ("wasmtime", &["session-runtime/src/agent"]),
    ("axum", &["session-runtime/src/api"]),
    ("utoipa", &["session-runtime/src/api"]),
    ("tokenizers", &["session-runtime/src/models", "session-runtime/tests/models"]),
    ("minijinja", &["session-runtime/src/models"]),
    ("llguidance", &["session-runtime/src/models"]),
    ("toktrie", &["session-runtime/src/models"]),
    ("tools_sdk", &["tools-sdk/", "guests/"]),
    ("store", &["store/", "session-runtime/"]),
];

/// Checks every path a file names.
pub(crate) fn check(source: &Source, file: &syn::File, findings: &mut Vec<Finding>) {
    let module = source.path.strip_prefix(HOST).map(Module::of_file);
    let mut walk = Walk { source, module, inline: 0, findings };
    walk.visit_file(file);
}

/// The module a file is.
struct Module {
    /// First part below the crate; `None` for the crate's own root.
    top: Option<String>,
    /// How many `super` lead to the crate's root.
    depth: usize,
}

impl Module {
    fn of_file(path: &str) -> Self {
        let mut parts: Vec<&str> = path.trim_end_matches(".rs").split('/').collect();
        if matches!(parts.last(), Some(&"mod" | &"lib" | &"main")) {
            parts.pop();
        }
        Self { top: parts.first().map(|part| (*part).to_owned()), depth: parts.len() }
    }
}

struct Walk<'a> {
    source: &'a Source,
    module: Option<Module>,
    /// Modules written inside the file around the current place.
    inline: usize,
    findings: &'a mut Vec<Finding>,
}

impl Walk<'_> {
    /// Looks at a path, given as its parts.
    fn path(&mut self, parts: &[String], line: usize) {
        let Some(first) = parts.first() else { return };
        for (name, owners) in OWNED {
            let owned = owners.iter().any(|owner| self.source.path.starts_with(owner));
            // A lone word is a variable or a module of one's own.
            if first == name && parts.len() > 1 && !owned {
                self.find(line, format!("only {} may know `{name}`", owners.join(" and ")));
            }
        }
        let Some(module) = &self.module else { return };
        let supers = parts.iter().take_while(|part| *part == "super").count();
        let target = if first == "crate" {
            parts.get(1)
        } else if supers > 0 && supers == module.depth + self.inline {
            parts.get(supers)
        } else {
            None
        };
        if let (Some(target), Some(own)) = (target, &module.top)
            && let Some(what) = wrong_arrow(own, target)
        {
            self.find(line, what);
        }
    }

    fn find(&mut self, line: usize, what: String) {
        self.findings.push(Finding::new(&self.source.path, line, what));
    }

    fn tree(&mut self, prefix: &[String], tree: &syn::UseTree) {
        let with = |ident: &syn::Ident| prefix.iter().cloned().chain([ident.to_string()]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(path) => self.tree(&with(&path.ident), &path.tree),
            syn::UseTree::Name(name) => self.path(&with(&name.ident), name.ident.span().start().line),
            syn::UseTree::Rename(rename) => {
                // Renaming a whole crate is naming it.
                let mut parts = with(&rename.ident);
                parts.push("self".to_owned());
                self.path(&parts, rename.ident.span().start().line);
            }
            syn::UseTree::Glob(glob) => {
                let mut parts = prefix.to_vec();
                parts.push("*".to_owned());
                self.path(&parts, glob.star_token.spans.first().map_or(0, |span| span.start().line));
            }
            syn::UseTree::Group(group) => {
                for item in &group.items {
                    self.tree(prefix, item);
                }
            }
        }
    }

    /// Paths inside a macro's arguments, which have no syntax of their own.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut parts: Vec<String> = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.path(&std::mem::take(&mut parts), line);
                    }
                    line = ident.span().start().line;
                    parts.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.path(&std::mem::take(&mut parts), line);
                    colons = 0;
                    self.tokens(group.stream());
                }
                _ => {
                    self.path(&std::mem::take(&mut parts), line);
                    colons = 0;
                }
            }
        }
        self.path(&parts, line);
    }
}

impl<'ast> Visit<'ast> for Walk<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(&[], &item.tree);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.inline += 1;
        visit::visit_item_mod(self, item);
        self.inline -= 1;
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let line = path.segments.first().map_or(0, |segment| segment.ident.span().start().line);
        self.path(&parts, line);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }
}

/// What is wrong with `own` using `target`, if anything.
fn wrong_arrow(own: &str, target: &str) -> Option<String> {
    let height = |name: &str| HEIGHTS.iter().find(|(module, _)| *module == name).map(|(_, height)| *height);
    let target_height = height(target)?;
    if own == target || own == "main" || own == "lib" {
        return None;
    }
    match height(own) {
        Some(own_height) if own_height > target_height => None,
        Some(_) => Some(format!("`{own}` must not know `{target}`, which is built on it")),
        None => Some(format!("`{own}` may be used by every module and must not know `{target}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<usize> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        let mut findings = Vec::new();
        check(&source, &syn::parse_file(text).unwrap(), &mut findings);
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn arrows_point_down() {
        let up =
            "use crate::session::Session;\nfn f() { crate::api::serve(); }\nuse crate::{models, agent as a};";
        assert_eq!(findings("session-runtime/src/engine/step.rs", up), [1, 2, 3]);
        let down = "use crate::engine::Engine;\nuse crate::session::Session;\nuse super::host;";
        assert!(findings("session-runtime/src/agent/mod.rs", down).is_empty());
        assert_eq!(findings("session-runtime/src/telemetry.rs", "use crate::kv::Pool;"), [1]);
        assert!(findings("session-runtime/src/lib.rs", "pub use crate::kv::Pool;").is_empty());
    }

    #[test]
    fn paths_through_super_and_macros_are_seen() {
        let path = "session-runtime/src/kv/pool.rs";
        assert_eq!(findings(path, "use super::super::session::Session;"), [1]);
        assert!(findings(path, "use super::session::Session;").is_empty());
        assert_eq!(findings(path, "mod tests {\n use super::super::super::api::A;\n}"), [2]);
        assert_eq!(findings(path, "fn f() {\n m!(a, crate::session::B);\n}"), [2]);
    }

    #[test]
    fn owned_crates_stay_with_their_owner() {
        assert_eq!(findings("session-runtime/src/api/mod.rs", "use wasmtime::Engine;"), [1]);
        assert!(findings("session-runtime/src/agent/mod.rs", "use wasmtime::Engine;").is_empty());
        assert_eq!(findings("session-runtime/src/kv/mod.rs", "fn f() { sled::open(p); }"), [1]);
        assert!(findings("kernels/src/lib.rs", "fn f(store: u32) -> u32 { store }").is_empty());
        assert_eq!(findings("kernels/src/lib.rs", "use store::Journal;"), [1]);
    }
}
