//! What the calculator says of expressions it cannot compute, and of those at its limits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::json;
use tools_sdk::testing::Host;
use tools_sdk::{Error, ErrorKind};

fn compute(expression: &str) -> Result<String, Error> {
    let input = json!({"expression": expression}).to_string();
    Host::new().call::<calculator::calculator>(&input).map(|output| output.text)
}

#[test]
fn failures_are_typed_and_say_where() {
    for (expression, code, position) in [
        ("", "syntax", 1),
        ("1 +", "syntax", 4),
        ("(1 + 2", "syntax", 7),
        ("1 + 2)", "syntax", 6),
        ("1 2", "syntax", 3),
        ("12,34", "syntax", 3),
        ("1,2345", "syntax", 2),
        ("1.2.3", "syntax", 4),
        ("1__2", "syntax", 2),
        (".", "syntax", 2),
        ("$5", "syntax", 1),
        ("cos(1)", "syntax", 1),
        ("sqrt 4", "syntax", 6),
        ("abs(1, 2)", "syntax", 1),
        ("sum()", "syntax", 5),
        ("10 / (3 - 3)", "division_by_zero", 4),
        ("0 ^ -1", "division_by_zero", 3),
        ("2 + sqrt(1 - 2)", "negative_root", 5),
        ("2 ^ 0.3", "fractional_exponent", 3),
        ("9 ^ 9 ^ 9", "overflow", 3),
        ("2 ^ 99999999999999999999", "overflow", 3),
        ("round(1, 1000)", "round_places", 1),
    ] {
        let error = compute(expression).unwrap_err();
        assert_eq!(error.code, code, "{expression}: {error}");
        assert!(error.message.contains(&format!("position {position}:")), "{expression}: {error}");
        let limit = code == "overflow";
        assert_eq!(error.kind == ErrorKind::Limit, limit, "{expression}");
    }
}

#[test]
fn size_and_depth_are_bounded() {
    assert_eq!(compute(&"(".repeat(2_000)).unwrap_err().code, "expression_too_deep");
    assert_eq!(compute(&"-".repeat(2_000)).unwrap_err().code, "expression_too_deep");
    assert_eq!(compute(&"2^".repeat(2_000)).unwrap_err().code, "expression_too_deep");
    assert_eq!(compute(&"1+".repeat(4_000)).unwrap_err().code, "expression_too_long");
    assert_eq!(compute(&format!("{}0", "1+".repeat(2_000))).unwrap().rsplit(' ').next(), Some("2000"));
    assert_eq!(compute(&"9".repeat(4_096)).unwrap().len(), 2 * 4_096 + 3);
}

#[test]
fn what_is_written_says_how_it_was_rounded() {
    let host = Host::new();
    let input = r#"{"expression": "2 / 3", "decimals": 2}"#;
    let output = host.call::<calculator::calculator>(input).unwrap();
    assert_eq!(output.text, "2 / 3 = 0.67 (rounded, 2 decimal places)");
    assert_eq!(
        output.json,
        r#"{"expression":"2 / 3","value":"0.67","exact":false,"precision":"2 decimal places"}"#
    );
    let output =
        host.call::<calculator::calculator>(r#"{"expression": "12.25 + 0.25", "decimals": 2}"#).unwrap();
    assert_eq!(output.text, "12.25 + 0.25 = 12.50");
    let error = host.call::<calculator::calculator>(r#"{"expression": "1", "decimals": 101}"#).unwrap_err();
    assert_eq!(error.code, "too_many_decimals");
}

#[test]
fn commas_group_thousands_outside_of_arguments_only() {
    assert_eq!(compute("1,234,567.5 + 1").unwrap(), "1,234,567.5 + 1 = 1234568.5");
    assert_eq!(compute("max(1,234)").unwrap(), "max(1,234) = 234");
    assert_eq!(compute("max((1,234), 5)").unwrap(), "max((1,234), 5) = 1234");
    assert_eq!(compute("max(1_234, 5)").unwrap(), "max(1_234, 5) = 1234");
}

#[test]
fn signs_and_powers_bind_as_in_mathematics() {
    for (expression, value) in [
        ("-2 ^ 2", "-4"),
        ("2 ^ -1", "0.5"),
        ("2 ^ 3 ^ 2", "512"),
        ("(-8) ^ 3", "-512"),
        ("4 ^ 0.5", "2"),
        ("4 ^ 1.5", "8"),
        ("0 ^ 0", "1"),
        ("(-1) ^ 99999999999999999999", "-1"),
        ("round(2.5)", "3"),
        ("round(-2.5)", "-3"),
        ("round(1234.567, -2)", "1200"),
        ("10 \u{d7} 2 \u{f7} 4 \u{2212} 1", "4"),
    ] {
        assert_eq!(compute(expression).unwrap(), format!("{expression} = {value}"));
    }
}
