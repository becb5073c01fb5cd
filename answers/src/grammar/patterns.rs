//! Patterns of the names of properties: those that listed properties have used up are said of these properties.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

/// Steps in which a question about a pattern must be answered.
const MOST_STEPS: u64 = 200_000;

/// Says of the properties whose names a pattern matches what it says, and drops patterns that match no other name: the
/// engine has no answer where nothing fits one.
pub(super) fn settle_patterns(map: &mut Map<String, Value>) {
    let Some(Value::Object(patterns)) = map.get("patternProperties") else {
        return;
    };
    let listed = map.get("properties").and_then(Value::as_object);
    let names: Vec<String> = listed.into_iter().flat_map(Map::keys).cloned().collect();
    let used_up: Vec<(String, Value)> = patterns
        .iter()
        .filter(|(pattern, _)| !names.is_empty() && matches_only(pattern, &names))
        .map(|(pattern, schema)| (pattern.clone(), schema.clone()))
        .collect();
    for (pattern, schema) in used_up {
        if let Some(Value::Object(patterns)) = map.get_mut("patternProperties") {
            patterns.remove(&pattern);
        }
        let Some(Value::Object(listed)) = map.get_mut("properties") else {
            return;
        };
        for (name, own) in listed.iter_mut() {
            if matches(&pattern, name) {
                *own = json!({"allOf": [own.take(), schema]});
            }
        }
    }
    if map["patternProperties"]
        .as_object()
        .is_some_and(Map::is_empty)
    {
        map.remove("patternProperties");
    }
}

/// A pattern as the engine reads it: it may match anywhere in a text.
fn searched(pattern: &str) -> RegexAst {
    RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))
}

/// True if a pattern matches a name.
fn matches(pattern: &str, name: &str) -> bool {
    let both = RegexAst::And(vec![searched(pattern), RegexAst::Literal(name.to_owned())]);
    is_empty(both) == Some(false)
}

/// True if it is certain that a pattern matches none but these names.
fn matches_only(pattern: &str, names: &[String]) -> bool {
    let names = names.iter().cloned().map(RegexAst::Literal).collect();
    let others = RegexAst::Not(Box::new(RegexAst::Or(names)));
    is_empty(RegexAst::And(vec![searched(pattern), others])) == Some(true)
}

/// True if no text matches; `None` if that takes too long to find out, or is no regular expression.
fn is_empty(ast: RegexAst) -> Option<bool> {
    let mut builder = RegexBuilder::new();
    let expression = builder.mk(&ast).ok()?;
    let mut regex = builder.to_regex_limited(expression, MOST_STEPS).ok()?;
    Some(regex.always_empty())
}
