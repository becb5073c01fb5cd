//! Tasks whose answers are calls of a tool or JSON, and whether answers are valid.

use crate::stats;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A task.
#[derive(Clone, Debug, Deserialize)]
pub struct RankTask {
    /// What is asked.
    pub prompt: String,
    /// The tool that is to be called; without one, the answer is to be JSON.
    pub tool: Option<TaskTool>,
    /// The schema of the call's arguments, or of the answer.
    pub schema: Value,
}

/// A tool.
#[derive(Clone, Debug, Deserialize)]
pub struct TaskTool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: String,
}

/// The tasks of the protocol.
///
/// # Errors
/// Never: a test reads them.
pub fn tasks() -> serde_json::Result<Vec<RankTask>> {
    serde_json::from_str(include_str!("tasks.json"))
}

/// What a model answered to a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskAnswer {
    /// True if it is what the schema asks for.
    pub valid: bool,
    /// Its JSON, if it is JSON, with the names of a call's tool; otherwise its text.
    pub said: String,
}

impl TaskAnswer {
    /// Judges the JSON text of an answer or, for a task with a tool, of the arguments of a call of `called`.
    pub fn new(task: &RankTask, called: Option<&str>, text: &str) -> Self {
        let value: Option<Value> = serde_json::from_str(text.trim()).ok();
        let right = called == task.tool.as_ref().map(|t| t.name.as_str());
        let said = match &value {
            Some(value) => value.to_string(),
            None => text.trim().to_owned(),
        };
        TaskAnswer {
            valid: right && value.is_some_and(|v| matches(&v, &task.schema)),
            said: called.map_or(String::new(), |name| format!("{name} ")) + &said,
        }
    }
}

/// True if a value is as a schema of the few kinds in `tasks.json` says.
fn matches(value: &Value, schema: &Value) -> bool {
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    match (schema["type"].as_str(), value) {
        (Some("string"), Value::String(_)) | (Some("boolean"), Value::Bool(_)) => true,
        (Some("integer"), Value::Number(n)) => n.is_i64() || n.is_u64(),
        (Some("array"), Value::Array(items)) => items.iter().all(|i| matches(i, &schema["items"])),
        (Some("object"), Value::Object(fields)) => {
            let required = schema["required"].as_array().into_iter().flatten();
            let mut required = required.filter_map(Value::as_str);
            required.all(|name| fields.contains_key(name))
                && (fields.iter()).all(|(name, field)| {
                    let known = schema["properties"].get(name);
                    known.is_some_and(|schema| matches(field, schema))
                })
        }
        _ => false,
    }
}

/// Answers to all tasks, drawn freely and held to the schema by a grammar.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskAnswers {
    /// Without a grammar.
    pub free: Vec<TaskAnswer>,
    /// With one.
    pub held: Vec<TaskAnswer>,
}

/// Shares of answers to tasks, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskShares {
    /// Valid ones.
    pub valid: f64,
    /// Valid ones of the source.
    pub source_valid: f64,
    /// Those that are the source's.
    pub same: f64,
}

impl TaskShares {
    fn new(answers: &[TaskAnswer], source: &[TaskAnswer]) -> Self {
        let share = |holds: fn(&TaskAnswer, &TaskAnswer) -> bool| {
            let pairs = answers.iter().zip(source);
            stats::mean(pairs.map(|(own, source)| f64::from(u8::from(holds(own, source)))))
        };
        TaskShares {
            valid: share(|own, _| own.valid),
            source_valid: share(|_, source| source.valid),
            same: share(|own, source| own.said == source.said),
        }
    }
}

/// How a file does tasks beside its source.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskFigures {
    /// Number of tasks.
    pub tasks: usize,
    /// Drawn without a grammar.
    pub free: TaskShares,
    /// Held to the schema by a grammar.
    pub held: TaskShares,
}

impl TaskFigures {
    /// Compares the answers of a file and of its source to the same tasks.
    pub fn new(answers: &TaskAnswers, source: &TaskAnswers) -> Self {
        TaskFigures {
            tasks: source.free.len(),
            free: TaskShares::new(&answers.free, &source.free),
            held: TaskShares::new(&answers.held, &source.held),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every keyword of the schemas is one that [`matches`] reads.
    fn is_known(schema: &Value) -> bool {
        let known = [
            "type",
            "properties",
            "required",
            "additionalProperties",
            "items",
            "enum",
        ];
        let Some(fields) = schema.as_object() else {
            return false;
        };
        let object = schema["type"] == "object";
        fields.keys().all(|k| known.contains(&k.as_str()))
            && (!object || schema["additionalProperties"] == false)
            && schema.get("items").is_none_or(is_known)
            && (schema["properties"].as_object().into_iter().flatten()).all(|(_, s)| is_known(s))
    }

    #[test]
    fn answers_are_judged_by_their_schemas() {
        let tasks = tasks().unwrap();
        assert_eq!(tasks.len(), 12);
        assert!(tasks.iter().all(|t| is_known(&t.schema)));
        let valid = |i: usize, called, text| TaskAnswer::new(&tasks[i], called, text).valid;
        let weather = Some("get_weather");
        assert!(valid(
            0,
            weather,
            r#" {"unit": "celsius", "city": "Lisbon"}"#
        ));
        assert!(!valid(
            0,
            weather,
            r#"{"unit": "kelvin", "city": "Lisbon"}"#
        ));
        assert!(!valid(0, weather, r#"{"city": "Lisbon"}"#));
        assert!(!valid(
            0,
            weather,
            r#"{"unit": "celsius", "city": "Lisbon", "day": 1}"#
        ));
        assert!(!valid(
            0,
            Some("weather"),
            r#"{"unit": "celsius", "city": "Lisbon"}"#
        ));
        assert!(!valid(0, None, r#"{"unit": "celsius", "city": "Lisbon"}"#));
        assert!(valid(2, Some("add_items"), r#"{"items": ["milk"]}"#));
        assert!(!valid(2, Some("add_items"), r#"{"items": ["milk", 2]}"#));
        assert!(valid(9, None, "{\"sum\": 42}\n"));
        for text in [
            "{\"sum\": 42.5}",
            "{\"sum\": \"42\"}",
            "The sum is 42.",
            "{\"sum\": 42",
        ] {
            assert!(!valid(9, None, text), "{text}");
        }
        // The same JSON in other words is the same answer.
        let said = |text| TaskAnswer::new(&tasks[9], None, text).said;
        assert_eq!(said("{\"sum\":42}"), said(" { \"sum\" : 42 } "));
    }

    #[test]
    fn shares_count_what_is_valid_and_what_is_the_same() {
        let answer = |valid, said: &str| TaskAnswer {
            valid,
            said: said.into(),
        };
        let source = [answer(true, "a"), answer(false, "b")];
        let found = TaskShares::new(&[answer(true, "c"), answer(false, "b")], &source);
        let (valid, source_valid, same) = (0.5, 0.5, 0.5);
        assert_eq!(
            found,
            TaskShares {
                valid,
                source_valid,
                same
            }
        );
    }
}
