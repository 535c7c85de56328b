//! Constraints allow what the schema allows and nothing else, whichever tokens a model prefers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/fixtures.rs"]
mod fixtures;
#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use proptest::prelude::*;
use serde_json::{Value, json};
use session_runtime::models::constraint::{Constraint, ConstraintError, ConstraintFactory, MAX_SCHEMA_BYTES};
use session_runtime::models::tokenizer::TokenKind;
use session_runtime::models::{Gguf, Tokenizer};

fn small() -> (Tokenizer, ConstraintFactory) {
    let mut file = gguf_writer::GgufFile::default();
    gguf_writer::set_vocabulary(&mut file, "smollm");
    let tokenizer = Tokenizer::from_gguf(&Gguf::from_bytes(file.to_bytes()).unwrap()).unwrap();
    let factory = ConstraintFactory::new(&tokenizer).unwrap();
    (tokenizer, factory)
}

fn number_schema() -> String {
    json!({
        "type": "object",
        "properties": {
            "name": { "enum": ["calculator", "wait"] },
            "count": { "type": "integer", "minimum": 0, "maximum": 99 },
            "tags": { "type": "array", "items": { "type": "boolean" }, "maxItems": 3 }
        },
        "required": ["name", "count", "tags"],
        "additionalProperties": false
    })
    .to_string()
}

/// Whether `text` is accepted as a whole.
fn accepts(tokenizer: &Tokenizer, mut constraint: Constraint, text: &str) -> bool {
    for id in tokenizer.encode_text(text).unwrap() {
        if !constraint.allowed().unwrap().is_allowed(id) {
            assert!(matches!(constraint.accept(id), Err(ConstraintError::NotAllowed { .. })));
            return false;
        }
        constraint.accept(id).unwrap();
    }
    assert_eq!(constraint.may_stop(), constraint.allowed().unwrap().is_allowed(tokenizer.eos()));
    constraint.may_stop()
}

/// Text of tokens drawn from the masks by `seed`, as a model without any sense would write.
fn draw(tokenizer: &Tokenizer, mut constraint: Constraint, mut seed: u64, limit: usize) -> Option<String> {
    let mut ids = Vec::new();
    for _ in 0..limit {
        let mask = constraint.allowed().unwrap();
        let allowed: Vec<u32> = mask.iter().collect();
        assert_eq!(allowed.len(), mask.count());
        assert!(!allowed.is_empty() && allowed.iter().all(|&id| mask.is_allowed(id)));
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let id = allowed[(seed >> 33) as usize % allowed.len()];
        if id == tokenizer.eos() {
            assert!(constraint.may_stop());
            return Some(tokenizer.decode(&ids));
        }
        assert_ne!(tokenizer.token_kind(id), TokenKind::Control);
        constraint.accept(id).unwrap();
        ids.push(id);
    }
    None
}

#[test]
fn schemas_accept_and_refuse() {
    let (tokenizer, factory) = small();
    let schema = number_schema();
    let check = |text: &str| accepts(&tokenizer, factory.json_schema(&schema).unwrap(), text);
    assert!(check(r#"{"name": "wait", "count": 42, "tags": [true, false]}"#));
    assert!(check(r#"{"name": "calculator", "count": 0, "tags": []}"#));
    for wrong in [
        "",
        r#"{"name": "wait"}"#,
        r#"{"name": "waits", "count": 1, "tags": []}"#,
        r#"{"name": "wait", "count": 100, "tags": []}"#,
        r#"{"name": "wait", "count": -1, "tags": []}"#,
        r#"{"name": "wait", "count": 1, "tags": [true, true, true, true]}"#,
        r#"{"name": "wait", "count": 1, "tags": [], "more": 1}"#,
        r#"{"name":"wait", "count": 1, "tags": []}"#,
        r#"  {"name": "wait", "count": 1, "tags": []}"#,
        r#"{"name": "wait", "count": 1, "tags": []} "#,
    ] {
        assert!(!check(wrong), "{wrong}");
    }
}

#[test]
fn style_can_be_asked_for() {
    let (tokenizer, factory) = small();
    let schema = json!({ "type": "array", "items": { "type": "null" }, "x-guidance": { "whitespace_flexible": true } });
    for text in ["[null,null]", "[ null ,\n null ]"] {
        assert!(accepts(&tokenizer, factory.json_schema(&schema.to_string()).unwrap(), text), "{text}");
    }
    assert!(accepts(&tokenizer, factory.json_schema("true").unwrap(), r#"{"any": [1, "x"]}"#));
}

#[test]
fn completion_and_stopping() {
    let (tokenizer, factory) = small();
    let mut constraint = factory.regex("[ab]+c?").unwrap();
    assert!(!constraint.may_stop() && !constraint.is_complete());
    let [a, b, c] = [b'a', b'b', b'c'].map(u32::from);
    assert_eq!(constraint.allowed().unwrap().iter().collect::<Vec<_>>(), [a, b]);
    constraint.accept(a).unwrap();
    assert!(constraint.may_stop() && !constraint.is_complete());
    assert_eq!(constraint.allowed().unwrap().iter().collect::<Vec<_>>(), [a, b, c, tokenizer.eos()]);
    // A refused token leaves the constraint as it was.
    for wrong in [u32::from(b'x'), tokenizer.special("<|im_start|>").unwrap(), 263, 264, u32::MAX] {
        assert!(
            matches!(constraint.accept(wrong), Err(ConstraintError::NotAllowed { token }) if token == wrong)
        );
        assert!(!constraint.allowed().unwrap().is_allowed(wrong));
    }
    let mut other = constraint.fork();
    constraint.accept(c).unwrap();
    assert!(constraint.is_complete() && constraint.may_stop());
    assert_eq!(constraint.allowed().unwrap().iter().collect::<Vec<_>>(), [tokenizer.eos()]);
    assert!(constraint.accept(a).is_err());
    constraint.accept(tokenizer.eos()).unwrap();
    assert!(constraint.is_complete());
    // The fork did not go along.
    assert!(!other.is_complete());
    other.accept(b).unwrap();
    other.accept(tokenizer.eos()).unwrap();
    assert!(other.is_complete());
}

#[test]
fn grammars_and_frames() {
    let (tokenizer, factory) = small();
    let grammar = "start: greeting \" \" NAME\ngreeting: \"hello\" | \"hi\"\nNAME: /[A-Z][a-z]+/";
    assert!(accepts(&tokenizer, factory.lark(grammar).unwrap(), "hello World"));
    assert!(!accepts(&tokenizer, factory.lark(grammar).unwrap(), "hello world"));
    let framed = |text: &str| {
        let constraint =
            factory.json_schema_between("<tool_call>\n", &number_schema(), "\n</tool_call>").unwrap();
        accepts(&tokenizer, constraint, text)
    };
    let json = r#"{"name": "wait", "count": 1, "tags": []}"#;
    assert!(framed(&format!("<tool_call>\n{json}\n</tool_call>")));
    assert!(!framed(json));
    assert!(!framed(&format!("<tool_call>\n{json}")));
    let bare = factory.json_schema_between("", &number_schema(), "").unwrap();
    assert!(accepts(&tokenizer, bare, json));
    // Text inside a string cannot become a control token.
    let text = factory.json_schema(r#"{"type": "string"}"#).unwrap();
    assert!(accepts(&tokenizer, text, r#""<|im_end|>""#));
    let mut text = factory.json_schema(r#"{"type": "string"}"#).unwrap();
    text.accept(u32::from(b'"')).unwrap();
    assert!(!text.allowed().unwrap().is_allowed(tokenizer.special("<|im_end|>").unwrap()));
}

#[test]
fn bad_requests_are_refused_with_the_reason() {
    let (_, factory) = small();
    let schema = |schema: Value| factory.json_schema(&schema.to_string()).unwrap_err().to_string();
    for (error, part) in [
        (factory.json_schema("{").unwrap_err().to_string(), "not JSON"),
        (factory.json_schema("3").unwrap_err().to_string(), "an object or a boolean"),
        (factory.json_schema("false").unwrap_err().to_string(), "allows nothing"),
        (schema(json!({ "type": "strange" })), "strange"),
        (schema(json!({ "type": "integer", "minimum": 5, "maximum": 1 })), "invalid JSON schema"),
        (schema(json!({ "$ref": "http://example.org/other.json" })), "invalid JSON schema"),
        (schema(json!({ "type": "string", "pattern": "(" })), "invalid JSON schema"),
        (factory.regex("(").unwrap_err().to_string(), "invalid regular expression"),
        (factory.lark("start: missing").unwrap_err().to_string(), "missing"),
        (factory.lark("").unwrap_err().to_string(), "invalid grammar"),
    ] {
        assert!(error.contains(part), "{part}: {error}");
        assert!(error.len() < 600 && !error.contains("backtrace"), "{error}");
    }
    let long = format!("{{\"description\": \"{}\"}}", "x".repeat(MAX_SCHEMA_BYTES));
    assert!(matches!(factory.json_schema(&long), Err(ConstraintError::TooLong { .. })));
    let deep = format!("{}{}", "{\"items\":".repeat(400), "true".to_owned() + &"}".repeat(400));
    assert!(factory.json_schema(&deep).is_err());
    // Repetitions are not unrolled: this costs nothing.
    let mut huge = factory.regex("((a{1,1000}){1,1000}){1,1000}").unwrap();
    assert_eq!(huge.allowed().unwrap().iter().collect::<Vec<_>>(), [u32::from(b'a')]);
}

#[test]
fn drawn_texts_are_valid_with_a_real_vocabulary() {
    for alias in ["smollm2-135m", "qwen2.5-coder-0.5b"] {
        let Some(path) = fixtures::model(alias) else { return };
        let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
        let factory = ConstraintFactory::new(&tokenizer).unwrap();
        for seed in 0..20 {
            let text = draw(&tokenizer, factory.json_schema(&number_schema()).unwrap(), seed, 200).unwrap();
            let value: Value = serde_json::from_str(&text).unwrap();
            assert!(["calculator", "wait"].contains(&value["name"].as_str().unwrap()));
            assert!(value["count"].as_u64().unwrap() <= 99);
            // The same seed draws the same text: masks are deterministic.
            let again = draw(&tokenizer, factory.json_schema(&number_schema()).unwrap(), seed, 200).unwrap();
            assert_eq!(text, again);
        }
        assert!(accepts(
            &tokenizer,
            factory.json_schema(&number_schema()).unwrap(),
            r#"{"name": "calculator", "count": 17, "tags": [true]}"#
        ));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn any_text_for_a_schema_never_panics(schema in "\\PC{0,80}|\\{\"type\": ?\"[a-z]{0,8}\"[^\"]{0,4}\\}") {
        let (_, factory) = small();
        if let Ok(mut constraint) = factory.json_schema(&schema) {
            prop_assert!(constraint.allowed().is_ok());
        }
        let _ = factory.regex(&schema);
        let _ = factory.lark(&schema);
    }

    #[test]
    fn drawn_strings_match(seed in any::<u64>()) {
        let (tokenizer, factory) = small();
        let constraint = factory.regex("(ab|hell){1,4}[0-9]{2}").unwrap();
        let text = draw(&tokenizer, constraint, seed, 64).unwrap();
        let digits = text.trim_start_matches(|c: char| "abhel".contains(c));
        prop_assert!(digits.len() == 2 && digits.chars().all(|c| c.is_ascii_digit()), "{}", text);
        let mut rest = &text[..text.len() - 2];
        let mut parts = 0;
        while !rest.is_empty() {
            rest = rest.strip_prefix("ab").or_else(|| rest.strip_prefix("hell")).expect("ab or hell");
            parts += 1;
        }
        prop_assert!((1..=4).contains(&parts));
    }
}
