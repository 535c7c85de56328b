//! The three operations against a host whose files are known.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use files::files;
use serde_json::{Value, json};
use tools_sdk::testing::Host;
use tools_sdk::{Error, ErrorKind};

fn notes() -> Host {
    Host::new()
        .file("notes", "march/train.txt", "Train to Basel\nAmount: 48.50\n")
        .file("notes", "march/hotel.txt", "Hotel\nAMOUNT: 129.00\n")
        .file("notes", "readme.txt", "Expense notes.\n")
        .file("notes", "photo.bin", [0xff, 0xd8, 0, 1])
}

fn text(host: &Host, input: &Value) -> String {
    host.call::<files>(&input.to_string()).unwrap().text
}

fn refusal(host: &Host, input: &Value) -> Error {
    host.call::<files>(&input.to_string()).unwrap_err()
}

#[test]
fn list_shows_one_level_in_name_order() {
    let host = notes();
    let top = "march/\nphoto.bin (4 bytes)\nreadme.txt (15 bytes)";
    for path in ["", "/", ".", "notes", "/notes/"] {
        assert_eq!(text(&host, &json!({"operation": "list", "query": path})), top, "{path}");
    }
    assert_eq!(
        text(&host, &json!({"operation": "list", "query": "", "path": "march"})),
        "march/hotel.txt (21 bytes)\nmarch/train.txt (29 bytes)"
    );
}

#[test]
fn search_finds_lines_below_a_folder_in_any_case() {
    let host = notes();
    let found = "march/hotel.txt line 2: AMOUNT: 129.00\nmarch/train.txt line 2: Amount: 48.50";
    assert_eq!(text(&host, &json!({"operation": "search", "query": "amount"})), found);
    assert_eq!(text(&host, &json!({"operation": "search", "path": "march", "query": " Amount "})), found);
    let one = json!({"operation": "search", "path": "march/train.txt", "query": "amount"});
    assert_eq!(text(&host, &one), "march/train.txt line 2: Amount: 48.50");
    assert_eq!(text(&host, &json!({"operation": "search", "query": "zebra"})), "No line was found.");
    assert_eq!(refusal(&host, &json!({"operation": "search", "query": " "})).code, "no_query");
    let elsewhere = json!({"operation": "search", "path": "documents", "query": "amount"});
    let note = "[left out: documents, which is not there; the whole folder was searched]";
    assert_eq!(text(&host, &elsewhere), format!("{found}\n{note}"));
    let outside = json!({"operation": "search", "path": "../documents", "query": "amount"});
    assert_eq!(refusal(&host, &outside).kind, ErrorKind::Denied);
}

#[test]
fn search_is_bounded_and_says_so() {
    let host =
        Host::new().file("notes", "long.txt", "amount\n".repeat(80)).file("notes", "next.txt", "amount");
    let output = host.call::<files>(r#"{"operation": "search", "query": "amount"}"#).unwrap();
    let json: Value = serde_json::from_str(&output.json).unwrap();
    assert_eq!(json["matches"].as_array().unwrap().len(), 50);
    assert!(output.text.ends_with("[left out: lines after the first 50]"), "{}", output.text);
    let host = Host::new().file("notes", "wide.txt", format!("amount {}", "x".repeat(500)));
    let line = text(&host, &json!({"operation": "search", "query": "amount"}));
    assert_eq!(line.len(), "wide.txt line 1: ".len() + 200 + "...".len());
}

#[test]
fn read_gives_text_and_where_it_goes_on() {
    let host = notes();
    let whole = json!({"operation": "read", "query": "march/train.txt"});
    assert_eq!(text(&host, &whole), "Train to Basel\nAmount: 48.50\n");
    // Three bytes a character: the cut may not be inside one.
    let euros = "\u{20ac}".repeat(5_000);
    let host = Host::new().file("notes", "long.txt", &euros);
    let mut read = String::new();
    let mut offset = 0;
    loop {
        let input = json!({"operation": "read", "query": "long.txt", "offset": offset}).to_string();
        let output: Value = serde_json::from_str(&host.call::<files>(&input).unwrap().json).unwrap();
        read.push_str(output["text"].as_str().unwrap());
        match output["next_offset"].as_u64() {
            Some(next) => offset = next,
            None => break,
        }
    }
    assert_eq!(read, euros);
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let host = notes();
    let read = |path: &str| refusal(&host, &json!({"operation": "read", "query": path}));
    assert_eq!(read("photo.bin").code, "not_text");
    assert_eq!(read("").code, "not_a_file");
    assert_eq!(read("march/plane.txt").kind, ErrorKind::NotFound);
    assert_eq!(read("march/../../secret").kind, ErrorKind::Denied);
    assert_eq!(refusal(&Host::new(), &json!({"operation": "list", "query": ""})).code, "no_grant");
}

#[test]
fn several_grants_are_told_apart_by_name() {
    let host = notes().file("bills", "march.txt", "amount due");
    assert_eq!(text(&host, &json!({"operation": "list", "query": ""})), "bills/\nnotes/");
    let found = text(&host, &json!({"operation": "search", "query": "amount d"}));
    assert_eq!(found, "bills/march.txt line 1: amount due");
    assert_eq!(
        text(&host, &json!({"operation": "read", "query": "", "path": "bills/march.txt"})),
        "amount due"
    );
    assert_eq!(refusal(&host, &json!({"operation": "list", "query": "taxes"})).code, "no_such_folder");
}
