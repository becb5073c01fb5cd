//! The table of all names that clients send, `fields.json`: what nq does with each field, and with each type
//! of item, part, block and tool. Parsers read a request through it ([`super::fields`]), and `/openapi.json`
//! is made from it, so that neither can differ from the other.
//!
//! A table has `served` fields with their JSON schemas (`{"$table": NAME}` stands for an object with a table
//! of its own), those `without_effect` (accepted, because no answer changes), those of which nq accepts `only`
//! some values, those `left_out` with a note and those `refused` unless their value asks for nothing; a key may hold several names. `types` says
//! the same of the values of `type`. What is in no list is unknown. A table `extends` others.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::OnceLock;

/// What nq does with a name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Use<'a> {
    /// It reads it.
    Served,
    /// It accepts and drops it: no answer changes.
    NoEffect,
    /// It accepts these values alone, and drops them; null always.
    Only(&'a [Value]),
    /// It answers without it and says so: what it is, in words.
    LeftOut(&'a str),
    /// It answers with an error: why.
    Refused(&'a str),
    /// The table does not have it, and refuses whatever it does not have: why.
    RefusedRest(&'a str),
    /// The table does not have it.
    Unknown,
}

/// What nq does with the fields of one object.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Served fields and their schemas, in order.
    served: Map<String, Value>,
    required: Vec<String>,
    uses: HashMap<String, Other>,
    types: HashMap<String, Other>,
    /// What nq does with types that are in no list.
    rest: Option<Other>,
    /// Why it refuses all fields that are in no list.
    refused_rest: Option<String>,
}

#[derive(Clone, Debug)]
enum Other {
    Served,
    NoEffect,
    Only(Vec<Value>),
    LeftOut(String),
    Refused(String),
}

impl Other {
    fn as_use(&self) -> Use<'_> {
        match self {
            Other::Served => Use::Served,
            Other::NoEffect => Use::NoEffect,
            Other::Only(values) => Use::Only(values),
            Other::LeftOut(what) => Use::LeftOut(what),
            Other::Refused(why) => Use::Refused(why),
        }
    }
}

impl Table {
    /// The table of this name, one of `fields.json`'s; an empty one if there is none.
    pub(crate) fn named(name: &str) -> &'static Table {
        static NONE: OnceLock<Table> = OnceLock::new();
        let found = tables().get(name);
        debug_assert!(found.is_some(), "no table {name}");
        found.unwrap_or_else(|| NONE.get_or_init(Table::default))
    }

    /// What nq does with a field.
    pub(crate) fn field(&self, name: &str) -> Use<'_> {
        if self.served.contains_key(name) {
            return Use::Served;
        }
        match (self.uses.get(name), &self.refused_rest) {
            (Some(other), _) => other.as_use(),
            (None, Some(why)) => Use::RefusedRest(why),
            (None, None) => Use::Unknown,
        }
    }

    /// The least and the most that a number may be, of which a schema may also allow other values.
    pub(crate) fn limits(&self, name: &str) -> (f64, f64) {
        let schema = self.served.get(name).unwrap_or(&Value::Null);
        let schema = schema["oneOf"].get(0).unwrap_or(schema);
        let limit = |key: &str| schema[key].as_f64();
        (
            limit("minimum").unwrap_or(f64::NEG_INFINITY),
            limit("maximum").unwrap_or(f64::INFINITY),
        )
    }

    /// What nq does with an object of this `type`.
    pub(crate) fn kind(&self, name: &str) -> Use<'_> {
        self.types.get(name).map_or(Use::Unknown, Other::as_use)
    }

    /// What to call an object that is left out because its `type` is unknown, if the table knows such objects.
    pub(crate) fn rest(&self) -> Option<&str> {
        match &self.rest {
            Some(Other::LeftOut(what)) => Some(what),
            _ => None,
        }
    }

    /// The JSON schema of an object with these fields.
    pub(crate) fn schema(&self) -> Value {
        let mut properties: Map<String, Value> = Map::new();
        for (name, schema) in &self.served {
            properties.insert(name.clone(), expanded(schema));
        }
        let mut named: Vec<(&String, &Other)> = self.uses.iter().collect();
        named.sort_by_key(|n| n.0);
        let mut apart = Map::new();
        for (name, other) in named {
            let list = match other {
                Other::Served => continue,
                Other::NoEffect => "x-without-effect",
                Other::Only(values) => {
                    let values: Vec<&Value> = values.iter().chain([&Value::Null]).collect();
                    properties.insert(name.clone(), json!({"enum": values, "example": values[0]}));
                    continue;
                }
                Other::LeftOut(_) => "x-left-out",
                Other::Refused(_) => "x-refused",
            };
            let names = apart.entry(list).or_insert_with(|| json!([]));
            names
                .as_array_mut()
                .into_iter()
                .for_each(|l| l.push(name.as_str().into()));
        }
        let mut schema = json!({"type": "object", "properties": properties});
        if !self.required.is_empty() {
            schema["required"] = json!(self.required);
        }
        for (key, names) in apart {
            schema[key] = names;
        }
        schema
    }
}

/// A schema with the objects that have tables written out.
pub(crate) fn expanded(schema: &Value) -> Value {
    match schema {
        Value::Array(list) => list.iter().map(expanded).collect(),
        Value::Object(map) => match map.get("$table").and_then(Value::as_str) {
            None => Value::Object(map.iter().map(|(k, v)| (k.clone(), expanded(v))).collect()),
            Some(name) => {
                let mut schema = Table::named(name).schema();
                for (key, value) in map.iter().filter(|(key, _)| *key != "$table") {
                    schema[key] = value.clone();
                }
                schema
            }
        },
        other => other.clone(),
    }
}

/// A table as the file has it.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct TableSource {
    extends: Vec<String>,
    served: Map<String, Value>,
    required: Vec<String>,
    without_effect: Map<String, Value>,
    only: HashMap<String, Vec<Value>>,
    left_out: HashMap<String, String>,
    refused: HashMap<String, String>,
    refused_rest: Option<String>,
    types: Option<Types>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Types {
    served: Vec<String>,
    without_effect: Vec<String>,
    left_out: HashMap<String, String>,
    refused: HashMap<String, String>,
    left_out_rest: Option<String>,
}

fn tables() -> &'static HashMap<String, Table> {
    static TABLES: OnceLock<HashMap<String, Table>> = OnceLock::new();
    TABLES.get_or_init(|| {
        // A test reads the file, which is part of the program.
        let written =
            serde_json::from_str::<HashMap<String, TableSource>>(include_str!("fields.json"));
        let written = written.unwrap_or_default();
        let table = |name: &String| (name.clone(), gathered(name, &written));
        written.keys().map(table).collect()
    })
}

/// A table with those that it extends; its own entries come first.
fn gathered(name: &str, all: &HashMap<String, TableSource>) -> Table {
    let mut table = Table { ..Table::default() };
    let Some(own) = all.get(name) else {
        return table;
    };
    table.served = own.served.clone();
    table.required = own.required.clone();
    table.refused_rest = own.refused_rest.clone();
    let mut add = |names: &str, other: &Other| {
        for name in names.split(' ') {
            table.uses.insert(name.to_owned(), other.clone());
        }
    };
    own.without_effect
        .keys()
        .for_each(|n| add(n, &Other::NoEffect));
    own.only
        .iter()
        .for_each(|(n, v)| add(n, &Other::Only(v.clone())));
    own.left_out
        .iter()
        .for_each(|(n, w)| add(n, &Other::LeftOut(w.clone())));
    own.refused
        .iter()
        .for_each(|(n, w)| add(n, &Other::Refused(w.clone())));
    if let Some(types) = &own.types {
        let mut add = |names: &str, other: &Other| {
            for name in names.split(' ') {
                table.types.insert(name.to_owned(), other.clone());
            }
        };
        types.served.iter().for_each(|n| add(n, &Other::Served));
        types
            .without_effect
            .iter()
            .for_each(|n| add(n, &Other::NoEffect));
        types
            .left_out
            .iter()
            .for_each(|(n, w)| add(n, &Other::LeftOut(w.clone())));
        types
            .refused
            .iter()
            .for_each(|(n, w)| add(n, &Other::Refused(w.clone())));
        table.rest = types.left_out_rest.clone().map(Other::LeftOut);
    }
    for base in &own.extends {
        let base = gathered(base, all);
        for (name, schema) in base.served {
            if !table.uses.contains_key(&name) {
                table.served.entry(name).or_insert(schema);
            }
        }
        for (name, other) in base.uses {
            if !table.served.contains_key(&name) {
                table.uses.entry(name).or_insert(other);
            }
        }
        for required in base.required {
            if !table.required.contains(&required) {
                table.required.push(required);
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file is read whole, no name is in it twice, and every table that it names is there.
    #[test]
    fn the_file_is_what_it_says() {
        let written: HashMap<String, TableSource> =
            serde_json::from_str(include_str!("fields.json")).unwrap();
        assert_eq!(written.len(), tables().len());
        fn named(value: &Value, out: &mut Vec<String>) {
            match value {
                Value::Object(map) => {
                    out.extend(map.get("$table").and_then(Value::as_str).map(str::to_owned));
                    map.values().for_each(|v| named(v, out));
                }
                Value::Array(list) => list.iter().for_each(|v| named(v, out)),
                _ => {}
            }
        }
        for (name, table) in &written {
            let mut others = table.extends.clone();
            table.served.values().for_each(|v| named(v, &mut others));
            for other in others {
                assert!(written.contains_key(&other), "{name} names {other}");
            }
            let keys = (table.without_effect.keys())
                .chain(table.only.keys())
                .chain(table.left_out.keys())
                .chain(table.refused.keys());
            let mut seen: Vec<&str> = table.served.keys().map(String::as_str).collect();
            for key in keys.flat_map(|k| k.split(' ')) {
                assert!(!seen.contains(&key), "{name} has {key} twice");
                seen.push(key);
            }
            for required in &table.required {
                assert!(
                    Table::named(name).served.contains_key(required),
                    "{name}: {required}"
                );
            }
        }
    }

    #[test]
    fn a_name_has_the_use_that_the_table_says() {
        let chat = Table::named("chat");
        assert_eq!(chat.field("temperature"), Use::Served);
        assert_eq!(chat.field("user"), Use::NoEffect);
        assert_eq!(chat.field("best_of"), Use::Only(&[json!(1)]));
        assert!(matches!(chat.field("web_search_options"), Use::LeftOut(_)));
        assert!(matches!(chat.field("audio"), Use::Refused(_)));
        assert_eq!(chat.field("nonsense"), Use::Unknown);
        // A count of tokens drops what the same request to an answer has.
        assert_eq!(Table::named("count_tokens").field("stream"), Use::NoEffect);
        assert!(matches!(
            Table::named("part").kind("input_audio"),
            Use::Refused(_)
        ));
        let result = Table::named("part.result");
        assert_eq!(result.kind("input_audio"), Use::LeftOut("audio"));
        assert_eq!(
            (result.kind("new"), result.rest()),
            (Use::Unknown, Some("part"))
        );
        let schema = chat.schema();
        let thinking = &schema["properties"]["thinking"];
        assert_eq!(thinking["properties"]["budget_tokens"]["type"], "integer");
        assert_eq!(thinking["example"]["type"], "disabled");
    }
}
