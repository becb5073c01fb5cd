//! What the schemas of tools say about their parameters: XML calls write values without their types.

use super::arguments::{mended, quoted, whole};
use percent_encoding::percent_decode_str;
use serde_json::Value;
use std::collections::HashSet;

/// How many references and alternatives are followed one inside the other.
const MOST_DEPTH: usize = 16;

/// How many schemas inside that of a tool are looked at for integers.
const MOST_PLACES: usize = 1000;

/// The tools that an answer may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    /// Names, and schemas of the arguments.
    pub list: Vec<(String, Value)>,
    /// True if an answer may make several calls.
    pub several: bool,
}

impl Tools {
    /// The schema of a tool's arguments, if there is such a tool.
    pub(super) fn schema(&self, name: &str) -> Option<&Value> {
        let found = self.list.iter().find(|(known, _)| known == name);
        found.map(|(_, schema)| schema)
    }

    /// The types that a tool's schema allows for a parameter; any if it does not say.
    pub(super) fn types(&self, name: &str, parameter: &str) -> Types {
        let parameter_types = |root| of_parameter(root, root, parameter, 0);
        self.schema(name)
            .and_then(parameter_types)
            .unwrap_or(Types::ANY)
    }

    /// The places of a tool's arguments that are integers where they are numbers: `days`, `trip/days` inside an object,
    /// `counts/*` inside a list.
    pub(super) fn integers(&self, name: &str) -> HashSet<String> {
        let Some(root) = self.schema(name) else {
            return HashSet::new();
        };
        let mut places = Places {
            root,
            integers: HashSet::new(),
            fractions: HashSet::new(),
            left: MOST_PLACES,
        };
        places.collect(root, "", 0);
        &places.integers - &places.fractions
    }

    /// The places of integers inside a parameter.
    pub(super) fn integers_in(&self, name: &str, parameter: &str) -> HashSet<String> {
        let inside =
            |place: String| Some(place.strip_prefix(parameter)?.strip_prefix('/')?.to_owned());
        self.integers(name).into_iter().filter_map(inside).collect()
    }

    /// True if a tool has this parameter, as far as its schema says.
    pub(super) fn has(&self, name: &str, parameter: &str) -> bool {
        let parameter_types = |root| of_parameter(root, root, parameter, 0);
        self.schema(name)
            .is_none_or(|root| parameter_types(root).is_some())
    }
}

/// The places of numbers in what a schema describes.
struct Places<'a> {
    root: &'a Value,
    integers: HashSet<String>,
    /// Where a number that is no integer is allowed.
    fractions: HashSet<String>,
    /// Schemas that may still be looked at.
    left: usize,
}

impl Places<'_> {
    /// Adds the places inside a value at `place` that has this schema.
    fn collect(&mut self, schema: &Value, place: &str, depth: usize) {
        if depth > MOST_DEPTH || self.left == 0 {
            return;
        }
        self.left -= 1;
        let root = self.root;
        let reference = schema["$ref"].as_str().and_then(|r| resolved(root, r));
        let others = ["anyOf", "oneOf", "allOf"].map(|key| schema[key].as_array());
        for same in others.into_iter().flatten().flatten().chain(reference) {
            self.collect(same, place, depth + 1);
        }
        let properties = schema["properties"].as_object().into_iter().flatten();
        let items = schema.get("items").map(|items| ("*", items));
        for (name, inner) in properties.map(|(name, p)| (name.as_str(), p)).chain(items) {
            let place = match place {
                "" => name.to_owned(),
                place => format!("{place}/{name}"),
            };
            let types = types(root, inner, 0);
            if types.is_integer() {
                self.integers.insert(place.clone());
            } else if types.has(Types::FRACTION) {
                self.fractions.insert(place.clone());
            }
            self.collect(inner, &place, depth + 1);
        }
    }
}

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    const NONE: Types = Types(0);
    const NULL: Types = Types(1);
    const BOOLEAN: Types = Types(2);
    const NUMBER: Types = Types(4);
    const TEXT: Types = Types(8);
    const LIST: Types = Types(16);
    const OBJECT: Types = Types(32);
    /// Of numbers: those that are no integers too.
    const FRACTION: Types = Types(64);
    const ANY: Types = Types(127);

    fn has(self, other: Types) -> bool {
        self.0 & other.0 != 0
    }

    fn or(self, other: Types) -> Types {
        Types(self.0 | other.0)
    }

    fn and(self, other: Types) -> Types {
        Types(self.0 & other.0)
    }

    /// True if numbers are integers.
    fn is_integer(self) -> bool {
        self.has(Types::NUMBER) && !self.has(Types::FRACTION)
    }

    /// True if values are strings, which are written as they are.
    pub(super) fn is_text(self) -> bool {
        self == Types::TEXT
    }

    fn named(name: &str) -> Types {
        match name {
            "null" => Types::NULL,
            "boolean" => Types::BOOLEAN,
            "integer" => Types::NUMBER,
            "number" => Types::NUMBER.or(Types::FRACTION),
            "string" => Types::TEXT,
            "array" => Types::LIST,
            "object" => Types::OBJECT,
            _ => Types::ANY,
        }
    }

    fn of(value: &Value) -> Types {
        match value {
            Value::Null => Types::NULL,
            Value::Bool(_) => Types::BOOLEAN,
            Value::Number(n) if n.as_f64().is_some_and(|n| n.fract() == 0.0) => Types::NUMBER,
            Value::Number(_) => Types::NUMBER.or(Types::FRACTION),
            Value::String(_) => Types::TEXT,
            Value::Array(_) => Types::LIST,
            Value::Object(_) => Types::OBJECT,
        }
    }
}

/// The schema that a reference inside `root` points to, whether its names are escaped as those of an address or not.
pub(crate) fn resolved<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    root.pointer(pointer).or_else(|| {
        let pointer = percent_decode_str(pointer).decode_utf8().ok()?;
        root.pointer(&pointer)
    })
}

/// True if a schema in `root` allows strings.
pub(crate) fn may_be_text(root: &Value, schema: &Value) -> bool {
    types(root, schema, 0).has(Types::TEXT)
}

/// The types that a schema allows.
fn types(root: &Value, schema: &Value, depth: usize) -> Types {
    let Value::Object(map) = schema else {
        return Types::ANY;
    };
    if depth > MOST_DEPTH {
        return Types::ANY;
    }
    let all = |list: &[Value], each: &dyn Fn(&Value) -> Types| {
        list.iter().map(each).fold(Types::NONE, Types::or)
    };
    let named = |name: &Value| name.as_str().map_or(Types::ANY, Types::named);
    let inner = |schema: &Value| types(root, schema, depth + 1);
    let mut allowed = Types::ANY;
    for (key, value) in map {
        let found = match (key.as_str(), value) {
            ("type", Value::Array(names)) => all(names, &named),
            ("type", name) => named(name),
            ("enum", Value::Array(values)) => all(values, &Types::of),
            ("const", value) => Types::of(value),
            ("anyOf" | "oneOf", Value::Array(schemas)) => all(schemas, &inner),
            ("allOf", Value::Array(schemas)) => {
                schemas.iter().map(inner).fold(Types::ANY, Types::and)
            }
            ("$ref", Value::String(reference)) => {
                resolved(root, reference).map_or(Types::ANY, inner)
            }
            _ => continue,
        };
        allowed = allowed.and(found);
    }
    allowed
}

/// The types of a parameter of an object; `None` if the schema does not mention it.
fn of_parameter(root: &Value, schema: &Value, parameter: &str, depth: usize) -> Option<Types> {
    if depth > MOST_DEPTH {
        return None;
    }
    let mut found = schema["properties"]
        .get(parameter)
        .map(|s| types(root, s, 0));
    let mut add = |more: Option<Types>| {
        found = match (found, more) {
            (Some(a), Some(b)) => Some(a.or(b)),
            (a, b) => a.or(b),
        }
    };
    for key in ["anyOf", "oneOf", "allOf"] {
        for inner in schema[key].as_array().into_iter().flatten() {
            add(of_parameter(root, inner, parameter, depth + 1));
        }
    }
    if let Some(inner) = schema["$ref"].as_str().and_then(|r| resolved(root, r)) {
        add(of_parameter(root, inner, parameter, depth + 1));
    }
    if found.is_none() && schema["additionalProperties"].is_object() {
        found = Some(types(root, &schema["additionalProperties"], 0));
    }
    found
}

/// The value that a text stands for, as JSON, with `integers` at places inside it. A text that is none of the types
/// stays a string.
pub(super) fn typed(text: &str, types: Types, integers: &HashSet<String>) -> String {
    if types.is_text() {
        return quoted(text);
    }
    let value = text.trim();
    if let Ok(json) = serde_json::from_str::<Value>(value)
        && !json.is_string()
        && types.has(Types::of(&json))
    {
        return match json.is_number() && types.is_integer() {
            true => whole(value).to_owned(),
            false if integers.is_empty() => value.to_owned(),
            false => mended(value, integers).unwrap_or_else(|| value.to_owned()),
        };
    }
    // As Python writes them. Where any type is allowed, they may be words.
    if types != Types::ANY {
        match value {
            "True" | "TRUE" if types.has(Types::BOOLEAN) => return "true".into(),
            "False" | "FALSE" if types.has(Types::BOOLEAN) => return "false".into(),
            "None" | "NULL" | "Null" if types.has(Types::NULL) => return "null".into(),
            _ => {}
        }
    }
    let begins = |c, kind| types.has(kind) && value.starts_with(c);
    let slipped = begins('{', Types::OBJECT) || begins('[', Types::LIST);
    match mended(value, integers).filter(|_| slipped) {
        Some(json) => json,
        None => quoted(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_have_the_types_of_the_schema() {
        let schema = json!({
            "properties": {
                "text": {"type": "string"},
                "maybe": {"type": ["string", "null"]},
                "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "flag": {"type": "boolean"},
                "count": {"type": "integer"},
                "ratio": {"anyOf": [{"type": "number"}, {"type": "string"}]},
                "kind": {"enum": ["1", "a"]},
                "level": {"const": 1},
                "list": {"type": "array"},
                "pet": {"$ref": "#/$defs/Pet"},
                "named": {"$ref": "#/$defs/Name"},
                "both": {"allOf": [{"$ref": "#/$defs/Name"}, {"type": ["string", "integer"]}]},
                "loop": {"$ref": "#/properties/loop"},
                "any": {},
                "trip": {"type": "object", "properties": {"days": {"type": "integer"}, "km": {"type": "number"}}},
                "counts": {"items": {"$ref": "#/properties/count"}},
                "either": {"anyOf": [
                    {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
                    {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
                ]},
            },
            "$defs": {"Pet": {"type": "object"}, "Name": {"type": "string"}},
        });
        let tools = Tools {
            list: vec![("f".into(), schema)],
            several: true,
        };
        for (parameter, text, expected) in [
            ("text", "{\"a\": 1}", r#""{\"a\": 1}""#),
            ("text", "12345", r#""12345""#),
            ("text", " true ", r#"" true ""#),
            ("text", "\"x\"", r#""\"x\"""#),
            ("maybe", "null", "null"),
            ("maybe", "1", r#""1""#),
            ("optional", "None", "null"),
            ("flag", "True", "true"),
            ("flag", "false", "false"),
            ("flag", "yes", r#""yes""#),
            (
                "count",
                " 12345678901234567890123 ",
                "12345678901234567890123",
            ),
            ("count", "three", r#""three""#),
            ("count", "5.0", "5"),
            ("count", "5.5", "5.5"),
            ("ratio", "5.0", "5.0"),
            ("ratio", "1.50", "1.50"),
            ("ratio", "1.5 m", r#""1.5 m""#),
            ("kind", "1", r#""1""#),
            ("level", "1", "1"),
            ("list", "['a', 1,]", r#"["a", 1]"#),
            ("list", "a, b", r#""a, b""#),
            ("pet", "{\"n\": 1.0}", "{\"n\": 1.0}"),
            ("pet", "{'n': True}", r#"{"n": true}"#),
            ("named", "7", r#""7""#),
            ("both", "7", r#""7""#),
            ("loop", "7", "7"),
            ("any", "7", "7"),
            ("any", "seven", r#""seven""#),
            ("any", "True", r#""True""#),
            ("any", "None", r#""None""#),
            ("unknown", "[1.0]", "[1.0]"),
            (
                "trip",
                r#"{"days": 3.0, "km": 3.0, "x": {"days": 3.0}}"#,
                r#"{"days": 3, "km": 3.0, "x": {"days": 3.0}}"#,
            ),
            ("trip", "{'days': 3.0}", r#"{"days": 3}"#),
            ("counts", "[1.0, 2.50, 3]", "[1, 2.50, 3]"),
            ("either", r#"{"a": 1.0, "b": 1.0}"#, r#"{"a": 1.0, "b": 1}"#),
        ] {
            let integers = tools.integers_in("f", parameter);
            let found = typed(text, tools.types("f", parameter), &integers);
            assert_eq!(found, expected, "{parameter}: {text}");
        }
        assert!(tools.has("f", "text") && !tools.has("f", "unknown") && tools.has("g", "x"));
    }

    #[test]
    fn parameters_are_found_in_references_and_alternatives() {
        let cat = json!({"properties": {"t": {"const": "1"}, "m": {"type": "integer"}}});
        let dog = json!({"properties": {"m": {"type": "string"}}});
        for schema in [
            json!({"$ref": "#/$defs/Cat", "$defs": {"Cat": cat}}),
            json!({"anyOf": [cat, dog]}),
            json!({"allOf": [{"properties": {"x": {}}}, cat]}),
            json!({"additionalProperties": {"type": "string"}}),
        ] {
            let tools = Tools {
                list: vec![("f".into(), schema.clone())],
                several: true,
            };
            let found = typed("1", tools.types("f", "t"), &HashSet::new());
            assert_eq!(found, r#""1""#, "{schema}");
        }
    }
}
