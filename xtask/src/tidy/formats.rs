//! Formats that others rely on do not change without their document.
//!
//! A document says which files define its format and what their digest was when it was last true, in two lines
//! anywhere in it:
//!
//! ```text
//! <!-- tidy: covers wit/tool/tool.wit wit/agent/agent.wit -->
//! <!-- tidy: digest 0123456789abcdef -->
//! ```
//! Paths are relative to the document. The digest is over code, not over comments, layout or tests. After a
//! change of the format and of the document, `cargo xtask tidy --pin` writes the digest.

use std::fs;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{Finding, Source};
use crate::process::{Failure, root};

/// The documents that have to be there.
const DOCUMENTS: [&str; 3] = ["tools-sdk/WIT.md", "store/FORMAT.md", "session-runtime/TRACE.md"];
const COVERS: &str = "<!-- tidy: covers ";
const DIGEST: &str = "<!-- tidy: digest ";
const END: &str = " -->";

/// Checks every document.
pub(crate) fn check(sources: &[Source], findings: &mut Vec<Finding>) {
    for document in DOCUMENTS {
        match state(sources, document) {
            Err(what) => findings.push(Finding::new(document, 0, what)),
            Ok((pinned, actual)) if pinned != actual => findings.push(Finding::new(
                document,
                0,
                "the files it covers have changed: describe the change, then run `cargo xtask tidy --pin`",
            )),
            Ok(_) => {}
        }
    }
}

/// Writes the digests of the files as they are.
pub(crate) fn pin(sources: &[Source]) -> Result<(), Failure> {
    for document in DOCUMENTS {
        if !sources.iter().any(|source| source.path == document) {
            continue;
        }
        let (pinned, actual) =
            state(sources, document).map_err(|what| Failure::Other(format!("{document}: {what}")))?;
        if pinned == actual {
            continue;
        }
        let path = root().join(document);
        let text = fs::read_to_string(&path).map_err(Failure::file(&path))?;
        let text = text.replace(&format!("{DIGEST}{pinned}{END}"), &format!("{DIGEST}{actual}{END}"));
        fs::write(&path, text).map_err(Failure::file(&path))?;
        println!("tidy: {document} is pinned to {actual}");
    }
    Ok(())
}

/// The digest a document names and the digest of the files it covers.
fn state(sources: &[Source], document: &str) -> Result<(String, String), String> {
    let find = |path: &str| sources.iter().find(|source| source.path == path);
    let text = &find(document).ok_or("is missing: it describes a format others rely on")?.text;
    let covered = marked(text, COVERS).ok_or_else(|| format!("has no line `{COVERS}FILE ...{END}`"))?;
    let pinned = marked(text, DIGEST).ok_or_else(|| format!("has no line `{DIGEST}HEX{END}`"))?;
    let folder = document.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut hasher = blake3::Hasher::new();
    for name in covered.split_whitespace() {
        let path = format!("{folder}/{name}");
        let source = find(&path).ok_or_else(|| format!("covers {name}, which is not there"))?;
        let code = code(source)?;
        hasher.update(name.as_bytes()).update(&[0]).update(code.as_bytes()).update(&[0]);
    }
    let actual = hasher.finalize().to_hex().chars().take(16).collect();
    Ok((pinned.to_owned(), actual))
}

fn marked<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(mark)?.strip_suffix(END)).map(str::trim)
}

/// What a file says without comments, layout and tests.
fn code(source: &Source) -> Result<String, String> {
    if source.is_rust() {
        let tokens: TokenStream = source
            .text
            .parse()
            .map_err(|error| format!("covers {}, which does not parse: {error}", source.path))?;
        let mut code = String::new();
        write_code(tokens, &mut code);
        return Ok(code);
    }
    let without_comments = source.text.lines().map(|line| line.split("//").next().unwrap_or_default());
    Ok(without_comments.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" "))
}

/// Tokens with spaces between them; documentation, which is an attribute by now, and test modules are left out.
fn write_code(tokens: TokenStream, code: &mut String) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                // `#![...]` and `#[...]`.
                let inner = matches!(tokens.peek(), Some(TokenTree::Punct(next)) if next.as_char() == '!');
                if inner {
                    tokens.next();
                }
                let Some(TokenTree::Group(attribute)) = tokens.peek() else {
                    code.push_str("# ");
                    continue;
                };
                let text = attribute.stream().to_string().replace(' ', "");
                tokens.next();
                if text == "cfg(test)" {
                    // Everything up to the block or semicolon that ends the item.
                    for skipped in tokens.by_ref() {
                        match skipped {
                            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
                            TokenTree::Punct(end) if end.as_char() == ';' => break,
                            _ => {}
                        }
                    }
                } else if !text.starts_with("doc=") {
                    code.push_str(&format!("#[{text}] "));
                }
            }
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("( ", ") "),
                    Delimiter::Brace => ("{ ", "} "),
                    Delimiter::Bracket => ("[ ", "] "),
                    Delimiter::None => ("", ""),
                };
                code.push_str(open);
                write_code(group.stream(), code);
                code.push_str(close);
            }
            other => {
                code.push_str(&other.to_string());
                code.push(' ');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(path: &str, text: &str) -> String {
        let document = format!("{COVERS}{path}{END}\n{DIGEST}0{END}\n");
        let sources = [
            Source { path: "store/FORMAT.md".to_owned(), text: document },
            Source { path: format!("store/{path}"), text: text.to_owned() },
        ];
        state(&sources, "store/FORMAT.md").unwrap().1
    }

    #[test]
    fn only_what_changes_the_format_changes_the_digest() {
        let plain = digest("a.rs", "const MAGIC: u32 = 7;");
        let documented =
            "//! Head.\n/// Doc.\nconst  MAGIC: u32\n = 7; // note\n#[cfg(test)]\nmod tests { fn f() {} }";
        assert_eq!(digest("a.rs", documented), plain);
        assert_ne!(digest("a.rs", "const MAGIC: u32 = 8;"), plain);
        assert_ne!(digest("b.rs", "const MAGIC: u32 = 7;"), plain);
        let wit = digest("a.wit", "interface a {\n  f: func();\n}");
        assert_eq!(digest("a.wit", "/// Doc.\ninterface a { f: func(); }"), wit);
        assert_ne!(digest("a.wit", "interface a { g: func(); }"), wit);
    }

    #[test]
    fn a_document_that_is_missing_or_does_not_fit_is_found() {
        let mut findings = Vec::new();
        check(&[], &mut findings);
        assert_eq!(findings.len(), DOCUMENTS.len());
        let text = format!("{COVERS}a.rs{END}\n{DIGEST}0{END}\n");
        let sources = [
            Source { path: "store/FORMAT.md".to_owned(), text },
            Source { path: "store/a.rs".to_owned(), text: "fn f() {}".to_owned() },
        ];
        let mut findings = Vec::new();
        check(&sources, &mut findings);
        assert!(findings.iter().any(|finding| finding.what.contains("have changed")));
    }
}
