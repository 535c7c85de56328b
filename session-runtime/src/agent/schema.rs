//! Checks a JSON document against the part of JSON Schema that tools and agents declare: `type`, `enum`,
//! `const`, `required`, `properties`, `additionalProperties: false`, `items`, lengths, item counts and
//! bounds of numbers, and `anyOf`/`oneOf`/`allOf`. Other keywords say nothing here; the guest checks them.

use serde_json::{Map, Value};

/// Nesting of schema and document that is still checked.
const DEPTH: usize = 32;

/// Parses a declared schema: a JSON object whose root type is `object`.
///
/// # Errors
/// A sentence that says what is wrong.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let schema: Value =
        serde_json::from_str(text).map_err(|error| format!("is no JSON document: {error}"))?;
    match schema.get("type").and_then(Value::as_str) {
        Some("object") => Ok(schema),
        _ => Err("has no root type `object`".to_owned()),
    }
}

/// Checks `value`.
///
/// # Errors
/// A sentence that names the property, such as `property 'expression' is missing`.
pub(super) fn check(schema: &Value, value: &Value) -> Result<(), String> {
    check_at(schema, value, "", DEPTH)
}

fn check_at(schema: &Value, value: &Value, at: &str, depth: usize) -> Result<(), String> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(format!("{} is nested too deeply", place(at)));
    };
    let schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(false) => return Err(format!("{} is not allowed", place(at))),
        _ => return Ok(()),
    };
    check_type(schema, value, at)?;
    check_choice(schema, value, at)?;
    match value {
        Value::Object(members) => check_members(schema, members, at, depth)?,
        Value::Array(items) => {
            check_count(schema, ("minItems", "maxItems"), items.len(), "items", at)?;
            if let Some(each) = schema.get("items") {
                for (index, item) in items.iter().enumerate() {
                    check_at(each, item, &format!("{at}[{index}]"), depth)?;
                }
            }
        }
        Value::String(text) => {
            check_count(schema, ("minLength", "maxLength"), text.chars().count(), "characters", at)?;
        }
        Value::Number(number) => check_bounds(schema, number.as_f64(), at)?,
        Value::Null | Value::Bool(_) => {}
    }
    check_combined(schema, value, at, depth)
}

fn check_type(schema: &Map<String, Value>, value: &Value, at: &str) -> Result<(), String> {
    let names: Vec<&str> = match schema.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => return Ok(()),
    };
    let fits = |name: &&str| match *name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => {
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
        }
        _ => true,
    };
    if names.iter().any(fits) {
        return Ok(());
    }
    Err(format!("{} must be of type {}, not {}", place(at), names.join(" or "), type_of(value)))
}

fn check_choice(schema: &Map<String, Value>, value: &Value, at: &str) -> Result<(), String> {
    if let Some(Value::Array(choices)) = schema.get("enum")
        && !choices.contains(value)
    {
        let list: Vec<String> = choices.iter().take(20).map(Value::to_string).collect();
        return Err(format!("{} must be one of {}", place(at), list.join(", ")));
    }
    match schema.get("const") {
        Some(only) if only != value => Err(format!("{} must be {only}", place(at))),
        _ => Ok(()),
    }
}

fn check_members(
    schema: &Map<String, Value>,
    members: &Map<String, Value>,
    at: &str,
    depth: usize,
) -> Result<(), String> {
    if let Some(Value::Array(required)) = schema.get("required") {
        for name in required.iter().filter_map(Value::as_str) {
            if !members.contains_key(name) {
                return Err(format!("{} is missing", place(&join(at, name))));
            }
        }
    }
    let none = Map::new();
    let declared = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    for (name, member) in members {
        let at = join(at, name);
        match (declared.get(name), schema.get("additionalProperties")) {
            (Some(schema), _) | (None, Some(schema @ Value::Object(_))) => {
                check_at(schema, member, &at, depth)?;
            }
            (None, Some(Value::Bool(false))) => {
                let known: Vec<&str> = declared.keys().map(String::as_str).collect();
                return Err(format!("{} is unknown; known are: {}", place(&at), known.join(", ")));
            }
            (None, _) => {}
        }
    }
    Ok(())
}

fn check_count(
    schema: &Map<String, Value>,
    (least, most): (&str, &str),
    count: usize,
    what: &str,
    at: &str,
) -> Result<(), String> {
    let bound = |name| schema.get(name).and_then(Value::as_u64);
    if let Some(least) = bound(least).filter(|least| (count as u64) < *least) {
        return Err(format!("{} has {count} {what}, fewer than {least}", place(at)));
    }
    if let Some(most) = bound(most).filter(|most| (count as u64) > *most) {
        return Err(format!("{} has {count} {what}, more than {most}", place(at)));
    }
    Ok(())
}

/// Whether a number keeps to a bound.
type Comparison = fn(f64, f64) -> bool;

fn check_bounds(schema: &Map<String, Value>, number: Option<f64>, at: &str) -> Result<(), String> {
    let Some(number) = number else { return Ok(()) };
    let bound = |name| schema.get(name).and_then(Value::as_f64);
    let tests: [(&str, Comparison, &str); 4] = [
        ("minimum", |number, bound| number >= bound, "at least"),
        ("maximum", |number, bound| number <= bound, "at most"),
        ("exclusiveMinimum", |number, bound| number > bound, "more than"),
        ("exclusiveMaximum", |number, bound| number < bound, "less than"),
    ];
    for (name, holds, words) in tests {
        if let Some(bound) = bound(name)
            && !holds(number, bound)
        {
            return Err(format!("{} must be {words} {bound}", place(at)));
        }
    }
    Ok(())
}

fn check_combined(schema: &Map<String, Value>, value: &Value, at: &str, depth: usize) -> Result<(), String> {
    let parts = |name| schema.get(name).and_then(Value::as_array);
    for part in parts("allOf").into_iter().flatten() {
        check_at(part, value, at, depth)?;
    }
    // `oneOf` is read as `anyOf`: that two branches fit is no reason to refuse a call.
    for choices in [parts("anyOf"), parts("oneOf")].into_iter().flatten() {
        let mut first = None;
        let fits = choices.iter().any(|choice| match check_at(choice, value, at, depth) {
            Ok(()) => true,
            Err(reason) => {
                first.get_or_insert(reason);
                false
            }
        });
        if let (false, Some(reason)) = (fits, first) {
            return Err(reason);
        }
    }
    Ok(())
}

fn join(at: &str, name: &str) -> String {
    let name = super::failure::scrub(name, 128);
    if at.is_empty() { name } else { format!("{at}.{name}") }
}

fn place(at: &str) -> String {
    if at.is_empty() { "the document".to_owned() } else { format!("property '{at}'") }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema() -> Value {
        json!({
            "type": "object",
            "required": ["expression"],
            "additionalProperties": false,
            "properties": {
                "expression": {"type": "string", "minLength": 1, "maxLength": 5},
                "precision": {"type": ["integer", "null"], "minimum": 0, "maximum": 10},
                "mode": {"enum": ["list", "read"]},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
                "at": {"anyOf": [{"type": "number"}, {"type": "object", "required": ["x"]}]},
            }
        })
    }

    #[test]
    fn good_documents_pass() {
        for good in [
            json!({"expression": "1+1"}),
            json!({"expression": "1", "precision": null, "mode": "read", "tags": ["a", "b"], "at": 1.5}),
            json!({"expression": "1", "precision": 2.0, "at": {"x": 1}}),
        ] {
            assert_eq!(check(&schema(), &good), Ok(()), "{good}");
        }
    }

    #[test]
    fn the_property_is_named() {
        for (bad, says) in [
            (json!([]), "the document must be of type object, not array"),
            (json!({}), "property 'expression' is missing"),
            (json!({"expression": 1}), "property 'expression' must be of type string, not number"),
            (json!({"expression": ""}), "property 'expression' has 0 characters, fewer than 1"),
            (json!({"expression": "123456"}), "property 'expression' has 6 characters, more than 5"),
            (json!({"expression": "1", "precision": 1.5}), "property 'precision' must be of type"),
            (json!({"expression": "1", "precision": 11}), "property 'precision' must be at most 10"),
            (json!({"expression": "1", "mode": "rm"}), "'mode' must be one of \"list\", \"read\""),
            (json!({"expression": "1", "tags": ["a", 2]}), "property 'tags[1]' must be of type string"),
            (json!({"expression": "1", "tags": ["a", "b", "c"]}), "'tags' has 3 items, more than 2"),
            (json!({"expression": "1", "at": "here"}), "property 'at' must be of type number"),
            (json!({"expression": "1", "colour": 1}), "property 'colour' is unknown; known are: "),
        ] {
            let error = check(&schema(), &bad).unwrap_err();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }

    #[test]
    fn i8_depth_is_bounded() {
        let mut schema = json!({"type": "integer"});
        let mut value = json!(1);
        for _ in 0..40 {
            schema = json!({"type": "array", "items": schema});
            value = json!([value]);
        }
        assert!(check(&schema, &value).unwrap_err().contains("nested too deeply"));
    }
}
