//! The `tojson` filter as chat templates mean it: Python's `json.dumps(value, ensure_ascii=False)`.
//!
//! Models were trained on that text, so spacing, key order and the spelling of floats matter.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// `value | tojson` and `value | tojson(indent=4)`.
pub(super) fn filter(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent = options.get::<Option<usize>>("indent")?.map(|indent| indent.min(16));
    // Accepted for compatibility; the text is never escaped to ASCII and keys keep their order.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let json = serde_json::to_value(&value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot turn into JSON").with_source(error)
    })?;
    Ok(Value::from_safe_string(dumps(&json, indent)))
}

/// The text Python's `json.dumps` gives for `value`.
pub(super) fn dumps(value: &Json, indent: Option<usize>) -> String {
    let mut out = String::new();
    write(value, indent, 0, &mut out);
    out
}

fn write(value: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(true) => out.push_str("true"),
        Json::Bool(false) => out.push_str("false"),
        Json::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => out.push_str(&float_repr(float)),
            _ => out.push_str(&number.to_string()),
        },
        Json::String(text) => write_string(text, out),
        Json::Array(items) if items.is_empty() => out.push_str("[]"),
        Json::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                separate(index, indent, depth + 1, out);
                write(item, indent, depth + 1, out);
            }
            close(indent, depth, out);
            out.push(']');
        }
        Json::Object(members) if members.is_empty() => out.push_str("{}"),
        Json::Object(members) => {
            out.push('{');
            for (index, (key, member)) in members.iter().enumerate() {
                separate(index, indent, depth + 1, out);
                write_string(key, out);
                out.push_str(": ");
                write(member, indent, depth + 1, out);
            }
            close(indent, depth, out);
            out.push('}');
        }
    }
}

fn separate(index: usize, indent: Option<usize>, depth: usize, out: &mut String) {
    if index > 0 {
        out.push(',');
    }
    match indent {
        Some(width) => new_line(width * depth, out),
        None if index > 0 => out.push(' '),
        None => {}
    }
}

fn close(indent: Option<usize>, depth: usize, out: &mut String) {
    if let Some(width) = indent {
        new_line(width * depth, out);
    }
}

fn new_line(spaces: usize, out: &mut String) {
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', spaces));
}

fn write_string(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            control if u32::from(control) < 0x20 => out.push_str(&format!("\\u{:04x}", u32::from(control))),
            other => out.push(other),
        }
    }
    out.push('"');
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16.
fn float_repr(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are what CPython 3's `json.dumps(..., ensure_ascii=False)` prints.
    #[test]
    fn agrees_with_python() {
        let cases = [
            (
                r#"{"b":1,"a":[1.5,true,null,"x<y> & 'z'"]}"#,
                r#"{"b": 1, "a": [1.5, true, null, "x<y> & 'z'"]}"#,
            ),
            (
                r#"[1e16,1e15,0.0001,0.00001,1.0,-0.0]"#,
                "[1e+16, 1000000000000000.0, 0.0001, 1e-05, 1.0, -0.0]",
            ),
            ("[1e300,12345678.9,1.5e-7]", "[1e+300, 12345678.9, 1.5e-07]"),
            (r#"["\u0001\u007f\b\f\n\t\\é中\"/"]"#, "[\"\\u0001\u{7f}\\b\\f\\n\\t\\\\é中\\\"/\"]"),
            ("[[],{}]", "[[], {}]"),
        ];
        for (input, expected) in cases {
            let value: Json = serde_json::from_str(input).unwrap();
            assert_eq!(dumps(&value, None), expected);
        }
        let value: Json = serde_json::from_str(r#"{"a":[1,2],"b":{}}"#).unwrap();
        assert_eq!(dumps(&value, Some(2)), "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {}\n}");
    }
}
