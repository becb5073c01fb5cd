//! `oneOf` whose alternatives exclude each other means what `anyOf` means, which can be enforced. llguidance finds that
//! out where alternatives are written out; here references are followed too.

use crate::output::resolved;
use serde_json::{Map, Value};

/// How many references are followed one after the other.
const MOST_REFERENCES: usize = 16;
/// Most alternatives that are compared with each other.
const MOST_ALTERNATIVES: usize = 64;

/// Turns `oneOf` into `anyOf` if no two of its alternatives allow the same value.
pub(super) fn settle_one_of(map: &mut Map<String, Value>, root: &Value) {
    let Some(Value::Array(alternatives)) = map.get("oneOf") else {
        return;
    };
    if map.contains_key("anyOf") || alternatives.len() > MOST_ALTERNATIVES {
        return;
    }
    let apart = |(i, a): (usize, &Value)| {
        alternatives[i + 1..]
            .iter()
            .all(|b| disjoint(a, b, root, 0))
    };
    if alternatives.iter().enumerate().all(apart)
        && let Some(alternatives) = map.remove("oneOf")
    {
        map.insert("anyOf".into(), alternatives);
    }
}

/// What a schema that is nothing but a reference refers to.
fn target<'a>(mut schema: &'a Value, root: &'a Value) -> &'a Value {
    for _ in 0..MOST_REFERENCES {
        let reference = schema.get("$ref").and_then(Value::as_str);
        match reference.and_then(|r| resolved(root, r)) {
            Some(found) => schema = found,
            None => break,
        }
    }
    schema
}

/// The values that a schema lists, if it lists them.
fn listed(schema: &Value) -> Option<&[Value]> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(values),
        _ => None,
    }
}

/// The types that a schema names, if it names any.
fn types(schema: &Value) -> Option<Vec<&str>> {
    match schema.get("type")? {
        Value::String(name) => Some(vec![name]),
        Value::Array(names) => names.iter().map(Value::as_str).collect(),
        _ => None,
    }
}

/// True if it is certain that no value fits both schemas.
fn disjoint(a: &Value, b: &Value, root: &Value, depth: usize) -> bool {
    if depth > MOST_REFERENCES {
        return false;
    }
    let (a, b) = (target(a, root), target(b, root));
    if let (Some(a), Some(b)) = (listed(a), listed(b)) {
        // Numbers that are written differently may be the same.
        let same = |a: &Value, b: &Value| match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => a == b,
        };
        let plain = a.iter().chain(b).all(|v| !v.is_array() && !v.is_object());
        return plain && !a.iter().any(|a| b.iter().any(|b| same(a, b)));
    }
    let (Some(of_a), Some(of_b)) = (types(a), types(b)) else {
        return false;
    };
    let number = |name: &str| name == "number" || name == "integer";
    let both = |a: &str| of_b.iter().any(|b| a == *b || number(a) && number(b));
    let shared: Vec<&str> = of_a.into_iter().filter(|a| both(a)).collect();
    if shared.is_empty() {
        return true;
    }
    // Objects are told apart by a property that both must have.
    let required = |schema: &Value, name: &str| {
        let names = schema.get("required").and_then(Value::as_array);
        names.is_some_and(|names| names.iter().any(|n| n == name))
    };
    let properties = |schema: &Value| schema.get("properties")?.as_object().cloned();
    let (Some(in_a), Some(in_b)) = (properties(a), properties(b)) else {
        return false;
    };
    shared == ["object"]
        && in_a.iter().any(|(name, of_a)| {
            let told = |of_b| disjoint(of_a, of_b, root, depth + 1);
            required(a, name) && required(b, name) && in_b.get(name).is_some_and(told)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn alternatives_that_exclude_each_other_are_any_of_them() {
        let kind = |name: &str| json!({"type": "object", "properties": {"kind": {"const": name}, "n": {}}, "required": ["kind"]});
        let loose = json!({"type": "object", "properties": {"kind": {"const": "cat"}}});
        let root = json!({"$defs": {
            "Cat": kind("cat"), "Dog": kind("dog"), "Loose": loose, "Any": {}, "Loop": {"$ref": "#/$defs/Loop"},
            "Word": {"type": "string"}, "To": {"$ref": "#/$defs/Dog"},
        }});
        let to = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
        for (alternatives, apart) in [
            (json!([to("Cat"), to("Dog")]), true),
            (json!([to("Cat"), to("To"), kind("bird")]), true),
            (json!([to("Cat"), to("Word"), {"type": "null"}]), true),
            (json!([{"enum": [1, "a"]}, {"const": 2}]), true),
            (json!([to("Cat"), to("Cat")]), false),
            (json!([to("Dog"), to("Loose")]), false),
            (json!([to("Cat"), to("Any")]), false),
            (json!([to("Cat"), to("Loop")]), false),
            (json!([{"type": "integer"}, {"type": "number"}]), false),
            (json!([{"enum": [1]}, {"const": 1.0}]), false),
            (json!([{"type": "string"}, {"const": "a"}]), false),
        ] {
            let mut schema = json!({"oneOf": alternatives});
            settle_one_of(schema.as_object_mut().unwrap(), &root);
            assert_eq!(schema.get("anyOf").is_some(), apart, "{schema}");
        }
        let mut both = json!({"oneOf": [to("Cat"), to("Dog")], "anyOf": [{}]});
        settle_one_of(both.as_object_mut().unwrap(), &root);
        assert!(both.get("oneOf").is_some());
    }
}
