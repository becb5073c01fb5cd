//! Turns clients' JSON schemas into schemas that llguidance supports: checks their size, and narrows them where
//! that is necessary or helps the model.

use super::bounds::{Multiples, uncounted};
use super::disjoint::settle_one_of;
use super::patterns::settle_patterns;
use crate::output::resolved;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde_json::{Map, Value, json};

/// Bytes of a schema or a grammar, at most.
pub(super) const MOST_BYTES: usize = 256 << 10;

/// How deep a schema may nest.
const MOST_DEPTH: usize = 64;

/// The keys of `x-guidance` that a schema may set.
const ALLOWANCES: [&str; 2] = ["coerce_one_of", "lenient"];

/// How deep arrays and objects nest.
fn depth(value: &Value) -> usize {
    let inner = match value {
        Value::Array(items) => items.iter().map(depth).max(),
        Value::Object(map) => map.values().map(depth).max(),
        _ => return 0,
    };
    1 + inner.unwrap_or(0)
}

fn check(schema: &Value) -> Result<(), String> {
    let (bytes, depth) = (schema.to_string().len(), depth(schema));
    if bytes > MOST_BYTES || depth > MOST_DEPTH {
        return Err(format!(
            "expected a schema of at most {MOST_BYTES} bytes and {MOST_DEPTH} levels, found {bytes} \
             and {depth}"
        ));
    }
    if !schema.is_object() && !schema.is_boolean() {
        return Err(format!(
            "expected a schema, which is an object, found {schema}"
        ));
    }
    Ok(())
}

/// A schema as llguidance is given it: [`narrowed`] and [`compact`].
///
/// # Errors
/// A description of the keyword that cannot be enforced.
pub(super) fn prepared(schema: &Value, space: &str) -> Result<Value, String> {
    compact(narrowed(schema)?, space)
}

/// A schema that llguidance supports and that allows nothing that `schema` does not.
///
/// # Errors
/// If `schema` is too large, or is not a schema; a number that cannot be enforced.
pub(super) fn narrowed(schema: &Value) -> Result<Value, String> {
    check(schema)?;
    let mut schema = closed(schema);
    let root = schema.clone();
    let lenient = root["x-guidance"]["lenient"] == true;
    let mut refused = None;
    let mut multiples = Multiples::default();
    each(&mut schema, &mut |map| {
        settle_format(map);
        settle_names(map, &root);
        settle_patterns(map);
        settle_one_of(map, &root);
        settle_reference(map, &root);
        // `false` says nothing. That items differ cannot be enforced: [`unenforced`] tells of it.
        map.remove("uniqueItems");
        for (keyword, why) in [
            ("multipleOf", multiples.unbounded(map)),
            ("minProperties", uncounted(map)),
        ] {
            if let Some(why) = why {
                map.remove(keyword);
                refused = refused.take().or(Some(format!("{keyword}: {why}")));
            }
        }
    });
    // A lenient schema does without a keyword that is refused alone; this is one of several.
    let together = multiples.unbounded_together();
    let together = together.map(|why| format!("multipleOf: {why}"));
    match refused.filter(|_| !lenient).or(together) {
        Some(why) => Err(why),
        None => Ok(schema),
    }
}

/// What an address may not contain behind `#`.
const ESCAPED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// The same where names have not been escaped at all.
const ESCAPED_WHOLLY: &AsciiSet = &ESCAPED.add(b'%');

/// Escapes a reference that generators of schemas wrote as its names are: `#/$defs/Page[Item]`.
fn settle_reference(map: &mut Map<String, Value>, root: &Value) {
    let Some(Value::String(reference)) = map.get_mut("$ref") else {
        return;
    };
    let Some(pointer) = reference.strip_prefix('#') else {
        return;
    };
    let set = match root.pointer(pointer) {
        Some(_) => ESCAPED_WHOLLY,
        None => ESCAPED,
    };
    *reference = format!("#{}", utf8_percent_encode(pointer, set));
}

/// A keyword of `schema` that answers are not held to, if there is one.
pub fn unenforced(schema: &Value) -> Option<&'static str> {
    let mut found = None;
    each(&mut schema.clone(), &mut |map| {
        if map.get("uniqueItems") == Some(&Value::Bool(true)) {
            found = Some("uniqueItems");
        }
    });
    found
}

/// A schema of objects that allows nothing that `schema` does not: what a tool's arguments must be.
///
/// # Errors
/// If `schema` allows no objects; errors of [`narrowed`].
pub(super) fn of_objects(schema: &Value) -> Result<Value, String> {
    let mut schema = narrowed(schema)?;
    let allows = |name: &Value| name == "object";
    match schema.get("type") {
        _ if schema == Value::Bool(true) => return Ok(json!({"type": "object"})),
        Some(kind) if allows(kind) => return Ok(schema),
        Some(Value::Array(kinds)) if kinds.iter().any(allows) => {}
        None if schema.is_object() => {}
        _ => {
            let kind = schema.get("type").unwrap_or(&schema);
            return Err(format!("expected a schema of objects, found {kind}"));
        }
    }
    if has_reference(&schema, "#") {
        // Where the schema refers to itself, it may mean more than objects.
        let asked = schema
            .as_object_mut()
            .and_then(|map| map.remove("x-guidance"));
        schema = within(&schema, &json!({"$ref": "#"}));
        if let Some(asked) = asked {
            schema["x-guidance"] = asked;
        }
    }
    schema["type"] = "object".into();
    Ok(schema)
}

/// `schema`, which stands in `root`, as a schema of its own: it means the same.
pub(super) fn within(root: &Value, schema: &Value) -> Value {
    let moved = |schema: &Value| {
        let (mut schema, mut refers) = (schema.clone(), false);
        each(&mut schema, &mut |map| {
            if let Some(Value::String(to)) = map.get_mut("$ref")
                && let Some(pointer) = to.strip_prefix('#')
                && (pointer.is_empty() || pointer.starts_with('/'))
            {
                *to = format!("#/$defs/schema{pointer}");
                refers = true;
            }
        });
        (schema, refers)
    };
    let (mut schema, refers) = moved(schema);
    if refers {
        schema["$defs"] = json!({"schema": moved(root).0});
    }
    schema
}

/// True if a schema in `schema` refers to `reference`.
fn has_reference(schema: &Value, reference: &str) -> bool {
    let mut found = false;
    each(&mut schema.clone(), &mut |map| {
        found |= map.get("$ref").is_some_and(|r| r == reference)
    });
    found
}

/// Restricts white space in the answer to `space`, a regular expression, after commas and colons: if any white
/// space were allowed, a model could write it without end.
///
/// `x-guidance` in the schema may set `coerce_one_of`, which treats `oneOf` as `anyOf` if its alternatives may
/// overlap, and `lenient`, which ignores keywords that cannot be enforced.
///
/// # Errors
/// If `x-guidance` has another key.
pub(super) fn compact(schema: Value, space: &str) -> Result<Value, String> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other,
    };
    let mut options = json!({
        "whitespace_flexible": false,
        "item_separator": format!(",{space}"),
        "key_separator": format!(":{space}"),
    });
    let asked = schema.get("x-guidance").and_then(Value::as_object);
    for (key, value) in asked.into_iter().flatten() {
        if !ALLOWANCES.contains(&key.as_str()) || !value.is_boolean() {
            return Err(format!(
                "x-guidance: expected {} as true or false, found {key}",
                ALLOWANCES.join(" and ")
            ));
        }
        options[key] = value.clone();
    }
    if schema.is_object() {
        schema["x-guidance"] = options;
    }
    Ok(schema)
}

/// Keywords beside which an object's properties are not all that there is to say about it.
#[rustfmt::skip]
const COMPOSED: [&str; 9] = [
    "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties",
    "anyOf", "oneOf", "if", "$ref",
];

/// True if `properties` has all names that are `required`.
fn lists_required(object: &Map<String, Value>) -> bool {
    let required = object.get("required").and_then(Value::as_array);
    let listed = |name: &Value| Some(object.get("properties")?.get(name.as_str()?).is_some());
    required
        .into_iter()
        .flatten()
        .all(|name| listed(name).unwrap_or(false))
}

/// Forbids further properties in objects that list theirs and say nothing about others: a model could add
/// properties without end. The result allows nothing that `schema` does not. Schemas that compose objects by
/// `allOf` are not changed.
fn closed(schema: &Value) -> Value {
    fn composes(value: &Value) -> bool {
        match value {
            Value::Object(map) => map.contains_key("allOf") || map.values().any(composes),
            Value::Array(items) => items.iter().any(composes),
            _ => false,
        }
    }
    fn close(value: &mut Value) {
        let Value::Object(map) = value else {
            return;
        };
        let lists = map.contains_key("properties");
        if lists && lists_required(map) && !COMPOSED.iter().any(|k| map.contains_key(*k)) {
            map.insert("additionalProperties".into(), false.into());
        }
        for (key, inner) in map.iter_mut() {
            match (key.as_str(), inner) {
                ("properties" | "$defs" | "definitions", Value::Object(inner)) => {
                    inner.values_mut().for_each(close);
                }
                ("items", inner) => close(inner),
                ("prefixItems", Value::Array(inner)) => inner.iter_mut().for_each(close),
                ("anyOf" | "oneOf", Value::Array(inner)) if !lists => {
                    inner.iter_mut().for_each(close);
                }
                _ => {}
            }
        }
    }
    let mut schema = schema.clone();
    if !composes(&schema) {
        close(&mut schema);
    }
    schema
}

/// Formats of strings that llguidance holds answers to.
#[rustfmt::skip]
const FORMATS: [&str; 10] = [
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
];

/// Formats of the standard that it does not know, each with one that allows less.
const NARROWER: [(&str, &str); 6] = [
    ("uri-reference", "uri"),
    ("uri-template", "uri"),
    ("iri", "uri"),
    ("iri-reference", "uri"),
    ("idn-email", "email"),
    ("idn-hostname", "hostname"),
];

/// Formats of the standard that are refused: none of [`FORMATS`] allows less.
const REFUSED: [&str; 3] = ["regex", "json-pointer", "relative-json-pointer"];

/// Puts a format that llguidance knows in place of another one of the standard, and drops names that the standard
/// does not have: it calls them annotations.
fn settle_format(map: &mut Map<String, Value>) {
    let Some(format) = map.get("format").and_then(Value::as_str) else {
        return;
    };
    let narrower = NARROWER.iter().find(|n| n.0 == format);
    if let Some((_, narrower)) = narrower {
        map.insert("format".into(), (*narrower).into());
    } else if !FORMATS.contains(&format) && !REFUSED.contains(&format) {
        map.remove("format");
    }
}

/// Says of properties what `propertyNames` says of their names, where that is the same: names are strings anyhow, a
/// list of names is one of properties, a pattern one of `patternProperties`.
fn settle_names(map: &mut Map<String, Value>, root: &Value) {
    let Some(mut names) = map.get("propertyNames") else {
        return;
    };
    if let Some(reference) = names.get("$ref").and_then(Value::as_str) {
        names = resolved(root, reference).unwrap_or(names);
    }
    let says = |known: &[&str]| {
        let notes = ["type", "title", "description", "$schema"];
        let keys = names.as_object().into_iter().flat_map(Map::keys);
        let known = |k: &String| known.contains(&k.as_str()) || notes.contains(&k.as_str());
        names.get("type").is_none_or(|t| t == "string") && keys.into_iter().all(known)
    };
    let alone = !["properties", "patternProperties"]
        .iter()
        .any(|k| map.contains_key(*k));
    let values = map
        .get("additionalProperties")
        .cloned()
        .unwrap_or(Value::Bool(true));
    let listed = match (names.get("enum"), names.get("const")) {
        (Some(Value::Array(list)), None) => Some(list.clone()),
        (None, Some(name)) => Some(vec![name.clone()]),
        _ => None,
    };
    if *names == Value::Bool(true) || names.is_object() && says(&[]) {
        map.remove("propertyNames");
    } else if let Some(list) = listed.filter(|_| alone && says(&["enum", "const"])) {
        let property = |name: &Value| Some((name.as_str()?.to_owned(), values.clone()));
        map.insert(
            "properties".into(),
            Value::Object(list.iter().filter_map(property).collect()),
        );
        map.insert("additionalProperties".into(), false.into());
        map.remove("propertyNames");
    } else if let Some(pattern) = names
        .get("pattern")
        .and_then(Value::as_str)
        .filter(|_| alone && says(&["pattern"]))
    {
        let patterns = json!({pattern: values});
        map.insert("patternProperties".into(), patterns);
        map.insert("additionalProperties".into(), false.into());
        map.remove("propertyNames");
    }
}

/// Calls `settle` with every schema in `schema` and `schema` itself, the outer ones last. Schemas that are negated
/// are left out: what allows less there would allow more.
fn each(schema: &mut Value, settle: &mut dyn FnMut(&mut Map<String, Value>)) {
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    for (key, inner) in map.iter_mut() {
        match (key.as_str(), inner) {
            (
                "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas",
                Value::Object(inner),
            ) => inner.values_mut().for_each(|s| each(s, settle)),
            ("items" | "prefixItems" | "anyOf" | "oneOf" | "allOf", Value::Array(inner)) => {
                inner.iter_mut().for_each(|s| each(s, settle));
            }
            (
                "items" | "additionalItems" | "additionalProperties" | "contains" | "propertyNames",
                inner,
            ) => {
                each(inner, settle);
            }
            _ => {}
        }
    }
    settle(map);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_closed_where_that_excludes_nothing_that_was_meant() {
        let open = json!({
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}},
                "c": {"anyOf": [{"properties": {"d": {}}}, {"type": "null"}]},
                "e": {"type": "object"},
                "f": {"properties": {"g": {}}, "anyOf": [{"properties": {"h": {}}}]},
                "i": {"properties": {}, "additionalProperties": {"type": "string"}},
                "l": {"properties": {"m": {}}, "required": ["m", "n"]},
            },
            "$defs": {"j": {"properties": {"k": {}}}},
        });
        let shut = closed(&open);
        let no = json!(false);
        for pointer in [
            "",
            "/properties/a/items",
            "/properties/c/anyOf/0",
            "/$defs/j",
        ] {
            let found = shut.pointer(&format!("{pointer}/additionalProperties"));
            assert_eq!(found, Some(&no), "{pointer}");
        }
        for pointer in [
            "/properties/e",
            "/properties/f",
            "/properties/f/anyOf/0",
            "/properties/i",
            "/properties/l",
        ] {
            assert_eq!(shut.pointer(pointer), open.pointer(pointer), "{pointer}");
        }
        let composed = json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]});
        assert_eq!(closed(&composed), composed);
    }

    #[test]
    fn schemas_have_bounds() {
        let mut deep = json!({"type": "string"});
        for _ in 0..MOST_DEPTH {
            deep = json!({"items": deep});
        }
        assert!(check(&deep).is_err());
        assert!(check(&json!({"const": "x".repeat(MOST_BYTES)})).is_err());
        assert!(check(&json!(3)).is_err());
        assert!(check(&json!({"type": "string"})).is_ok() && check(&json!(true)).is_ok());
    }

    #[test]
    fn formats_become_ones_that_are_known_and_allow_no_more() {
        let schema = json!({
            "properties": {
                "format": {"type": "string", "format": "iri"},
                "b": {"items": {"format": "path"}, "const": {"format": "path"}},
                "c": {"anyOf": [{"format": "date"}, {"format": "regex"}]},
            },
        });
        let expected = json!({
            "properties": {
                "format": {"type": "string", "format": "uri"},
                "b": {"items": {}, "const": {"format": "path"}},
                "c": {"anyOf": [{"format": "date"}, {"format": "regex"}]},
            },
            "additionalProperties": false,
        });
        assert_eq!(narrowed(&schema), Ok(expected));
    }

    #[test]
    fn a_schema_allows_what_is_not_served_by_name_alone() {
        let with = |options| compact(json!({"x-guidance": options}), " ?");
        let taken = with(json!({"coerce_one_of": true})).unwrap();
        assert_eq!(taken["x-guidance"]["coerce_one_of"], true);
        assert_eq!(taken["x-guidance"]["item_separator"], ", ?");
        for options in [json!({"whitespace_flexible": true}), json!({"lenient": 1})] {
            assert!(with(options).is_err());
        }
        assert_eq!(compact(json!(false), " ?"), Ok(json!(false)));
    }
}
