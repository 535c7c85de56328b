//! A file is one idea and a function one step: their sizes, and names that promise neither.

use syn::visit::{self, Visit};

use super::{Finding, Source};

/// Most lines of a file of code.
const FILE_LINES: usize = 700;
/// Most lines of a function, from its name to its last brace.
const FUNCTION_LINES: usize = 100;
/// Endings of files of code.
const CODE: [&str; 8] = [".rs", ".py", ".cu", ".cuh", ".wit", ".js", ".css", ".html"];
/// Names of modules that say nothing about what is in them.
const EMPTY_NAMES: [&str; 7] = ["utils", "util", "common", "helpers", "helper", "misc", "types"];

/// Checks a file as a whole.
pub(crate) fn check(source: &Source, findings: &mut Vec<Finding>) {
    if !CODE.iter().any(|ending| source.path.ends_with(ending)) {
        return;
    }
    let lines = source.text.lines().count();
    if lines > FILE_LINES {
        findings.push(Finding::new(&source.path, 0, format!("{lines} lines; at most {FILE_LINES}")));
    }
    for part in source.path.split('/') {
        let stem = part.split('.').next().unwrap_or(part);
        if EMPTY_NAMES.contains(&stem) {
            let what = format!("a module called `{stem}` is about nothing: name it after its idea");
            findings.push(Finding::new(&source.path, 0, what));
        }
    }
}

/// Checks every function of a file.
pub(crate) fn check_functions(source: &Source, file: &syn::File, findings: &mut Vec<Finding>) {
    Functions { path: &source.path, findings }.visit_file(file);
}

struct Functions<'a> {
    path: &'a str,
    findings: &'a mut Vec<Finding>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let first = signature.fn_token.span.start().line;
        let lines = block.brace_token.span.close().end().line.saturating_sub(first) + 1;
        if lines > FUNCTION_LINES {
            let what = format!("fn {} has {lines} lines; at most {FUNCTION_LINES}", signature.ident);
            self.findings.push(Finding::new(self.path, first, what));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        let mut findings = Vec::new();
        check(&source, &mut findings);
        check_functions(&source, &syn::parse_file(text).unwrap(), &mut findings);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn long_files_and_functions_are_found() {
        let body = |lines: usize| {
            format!("impl A {{\n    fn long() {{\n{}    }}\n}}\n", "        f();\n".repeat(lines))
        };
        assert!(findings("a/b.rs", &body(98)).is_empty());
        assert_eq!(findings("a/b.rs", &body(99)), ["a/b.rs:2: fn long has 101 lines; at most 100"]);
        assert_eq!(findings("a/b.rs", &"\n".repeat(701)), ["a/b.rs: 701 lines; at most 700"]);
    }

    #[test]
    fn empty_names_are_found_in_files_and_folders() {
        assert_eq!(findings("a/utils.rs", "").len(), 1);
        assert_eq!(findings("a/common/mod.rs", "").len(), 1);
        assert!(findings("a/commons.rs", "").is_empty());
    }
}
