//! JSON Schemas of Rust types, in the narrow form that hosts, clients and constrained decoding all accept:
//! no `$ref`, no `$schema`, an object at the root.

use schemars::JsonSchema;
use schemars::generate::{Contract, SchemaSettings};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::Error;

/// Schema of what `T` accepts when it is read from JSON.
///
/// # Errors
/// `schema_root` when `T` is not an object, `schema_reference` when it contains itself (a recursive type
/// cannot be written without a reference).
pub fn input<T: JsonSchema>() -> Result<String, Error> {
    schema_of::<T>(Contract::Deserialize)
}

/// Schema of what `T` is written as. Errors as for [`input`].
///
/// # Errors
/// As for [`input`].
pub fn output<T: JsonSchema>() -> Result<String, Error> {
    schema_of::<T>(Contract::Serialize)
}

/// Reads a JSON object as `T`; why not, otherwise. Anything but an object is refused, also where serde would read
/// a struct from a list of its fields.
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    if !text.trim_start().starts_with('{') {
        return Err("expected an object".to_owned());
    }
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn schema_of<T: JsonSchema>(contract: Contract) -> Result<String, Error> {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
        settings.contract = contract;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    // The title is a Rust type's name: no news to anyone who reads the schema.
    schema.remove("title");
    let value = schema.to_value();
    let name = T::schema_name();
    if value.get("type").and_then(Value::as_str) != Some("object") {
        return Err(Error::failed(
            "schema_root",
            format!("the schema of {name} must be an object: use a struct"),
        ));
    }
    if has_reference(&value) {
        return Err(Error::failed(
            "schema_reference",
            format!(
                "the schema of {name} contains itself: recursive types cannot be a tool's input or output"
            ),
        ));
    }
    Ok(value.to_string())
}

fn has_reference(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(has_reference),
        Value::Array(items) => items.iter().any(has_reference),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "lowercase")]
    enum Colour {
        Red,
        Green,
    }

    /// A thing.
    #[derive(Serialize, Deserialize, JsonSchema)]
    struct Thing {
        /// Its colour.
        colour: Colour,
        size: Option<u32>,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    struct Tree {
        children: Vec<Tree>,
    }

    #[test]
    fn structs_become_objects_with_everything_inline() {
        let schema: Value = serde_json::from_str(&input::<Thing>().unwrap()).unwrap();
        assert_eq!(schema["type"], "object");
        assert_eq!(schema["required"], serde_json::json!(["colour"]));
        assert_eq!(schema["properties"]["colour"]["enum"], serde_json::json!(["red", "green"]));
        assert_eq!(schema["properties"]["colour"]["description"], "Its colour.");
        assert!(schema.get("$schema").is_none() && schema.get("title").is_none());
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        assert_eq!(input::<String>().unwrap_err().code, "schema_root");
        assert_eq!(output::<Tree>().unwrap_err().code, "schema_reference");
    }
}
