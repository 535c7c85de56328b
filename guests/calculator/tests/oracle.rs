//! The calculator against values computed by Python's fractions and decimal, see `generate_cases.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::{Value, json};
use tools_sdk::testing::Host;

#[test]
fn agrees_with_python_on_every_case() {
    let cases: Vec<Value> =
        include_str!("cases.json").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cases.len(), 900);
    let host = Host::new();
    for case in cases {
        let mut input = json!({"expression": case[0]});
        if !case[1].is_null() {
            input["decimals"] = case[1].clone();
        }
        let output =
            host.call::<calculator::calculator>(&input.to_string()).unwrap_or_else(|e| panic!("{case}: {e}"));
        let output: Value = serde_json::from_str(&output.json).unwrap();
        assert_eq!((&output["value"], &output["exact"]), (&case[2], &case[3]), "{case}");
    }
}
