//! Words that do not belong into the repository: marks of unfinished work, places of one machine, numbers of
//! someone's tracker. The patterns are put together here so that this file does not contain them.

use super::{Finding, Source};

/// Marks of unfinished work, as whole words.
const UNFINISHED: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
/// Calls that stand for unwritten code.
const UNWRITTEN: [&str; 3] =
    [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("not yet ", "implemented")];
/// Places of one machine.
const PLACES: [&str; 4] =
    [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
/// Hosts of package registries.
const REGISTRIES: [&str; 6] = [
    concat!("py", "pi.org"),
    concat!("pythonhos", "ted.org"),
    concat!("crat", "es.io"),
    concat!("npm", "js.org"),
    concat!("npm", "js.com"),
    concat!("pkg.go", ".dev"),
];
/// Files that tools write, or whose text is data.
const EXEMPT: [&str; 3] = ["Cargo.lock", ".jsonl", ".json"];

/// Checks every line of a file.
pub(crate) fn check(source: &Source, findings: &mut Vec<Finding>) {
    if EXEMPT.iter().any(|ending| source.path.ends_with(ending)) {
        return;
    }
    for (line, number) in source.text.lines().zip(1..) {
        for what in line_findings(line, source.is_rust()) {
            findings.push(Finding::new(&source.path, number, what));
        }
    }
}

fn line_findings(line: &str, rust: bool) -> Vec<String> {
    let mut found = Vec::new();
    for word in UNFINISHED {
        if contains_word(line, word) {
            found.push(format!("`{word}` marks unfinished work"));
        }
    }
    for call in UNWRITTEN {
        if line.contains(call) {
            found.push(format!("`{call}` stands for unwritten code"));
        }
    }
    if rust && line.trim_start().starts_with(concat!("#[ig", "nore]")) {
        found.push("an ignored test says why: write the reason into the attribute".to_owned());
    }
    for place in PLACES {
        if line.contains(place) {
            found.push(format!("`{place}` is a place on one machine"));
        }
    }
    for host in REGISTRIES {
        if line.to_ascii_lowercase().contains(host) {
            found.push(format!("`{host}` is a registry's host: name the package and let its client find it"));
        }
    }
    if names_issue(line) {
        found.push("a tracker's number says nothing here: write what it was about".to_owned());
    }
    found
}

fn contains_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        let after = line.get(at + word.len()..).and_then(|text| text.chars().next());
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// Whether a line refers to a tracker: the word, a number sign and digits, or a path with digits.
fn names_issue(line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    let digits_after = |rest: &str, skip: &str| {
        rest.trim_start_matches([' ', 's'])
            .strip_prefix(skip)
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let issue = concat!("iss", "ue");
    lower.match_indices(issue).any(|(at, _)| {
        lower.get(at + issue.len()..).is_some_and(|rest| digits_after(rest, "#") || digits_after(rest, "/"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pattern_is_found_as_a_word_and_not_inside_one() {
        for word in UNFINISHED {
            assert_eq!(line_findings(&format!("// {word}: later"), true).len(), 1, "{word}");
            assert!(line_findings(&format!("let a{word}b = 1;"), true).is_empty(), "{word}");
        }
        for place in PLACES {
            assert_eq!(line_findings(&format!("see {place}me"), false).len(), 1, "{place}");
        }
        for host in REGISTRIES {
            assert_eq!(line_findings(&format!("https://{host}/x"), false).len(), 1, "{host}");
        }
        let tracker = concat!("iss", "ue");
        for line in [format!("{tracker} #12"), format!("{tracker}s/12"), format!("{tracker}s #1")] {
            assert_eq!(line_findings(&line, false).len(), 1, "{line}");
        }
        assert!(line_findings(&format!("an {tracker} of trust"), false).is_empty());
        assert!(line_findings("a homely workplace", false).is_empty());
    }
}
