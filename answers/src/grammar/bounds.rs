//! Numbers in schemas that would take too long, or that a grammar cannot count.

use serde_json::{Map, Value};

/// Most units of the last decimal that a multiple may have: its automaton has as many states.
const MOST_UNITS: u64 = 10_000;

/// A number as whole units of its last decimal.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Units {
    units: u64,
    decimals: u32,
}

impl Units {
    /// `None` if there are too many.
    fn of_number(number: f64) -> Option<Self> {
        let (mut units, mut decimals) = (number.abs(), 0);
        while units.fract() != 0.0 && units <= MOST_UNITS as f64 {
            units *= 10.0;
            decimals += 1;
        }
        (units <= MOST_UNITS as f64).then_some(Units {
            units: units as u64,
            decimals,
        })
    }

    /// The least common multiple of both; `None` if it has too many units.
    fn common(self, other: Units) -> Option<Self> {
        let decimals = self.decimals.max(other.decimals);
        let scaled = |n: Units| {
            let scale = 10u64.checked_pow(decimals - n.decimals)?;
            n.units.checked_mul(scale)
        };
        let (a, b) = (scaled(self)?, scaled(other)?);
        let (mut divisor, mut rest) = (a, b);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        let units = match divisor {
            0 => 0,
            divisor => (a / divisor).checked_mul(b)?,
        };
        (units <= MOST_UNITS).then_some(Units { units, decimals })
    }
}

/// The multiples that a schema asks for. Where schemas are put together, a number may have to be one of several.
#[derive(Debug, Default)]
pub(super) struct Multiples {
    known: Vec<f64>,
    /// True once there are keywords that put schemas together.
    composes: bool,
}

impl Multiples {
    /// Takes the next schema; why its `multipleOf` cannot be enforced, if it cannot.
    pub(super) fn unbounded(&mut self, map: &Map<String, Value>) -> Option<String> {
        let keys = ["allOf", "anyOf", "oneOf", "$ref"];
        self.composes |= keys.iter().any(|key| map.contains_key(*key));
        let multiple = map.get("multipleOf").and_then(Value::as_f64)?;
        if Units::of_number(multiple).is_some() {
            if !self.known.contains(&multiple) {
                self.known.push(multiple);
            }
            return None;
        }
        Some(format!(
            "expected at most {MOST_UNITS} units of its last decimal, found {multiple}"
        ))
    }

    /// Why those taken cannot be enforced together, if they cannot.
    pub(super) fn unbounded_together(&self) -> Option<String> {
        let mut all = self.known.iter().map(|n| Units::of_number(*n));
        let first = all.next().filter(|_| self.composes)?;
        let common = all.try_fold(first?, |common, next| common.common(next?));
        common.is_none().then(|| {
            format!("expected a common multiple of at most {MOST_UNITS} units together with allOf, anyOf, oneOf and $ref")
        })
    }
}

/// Why a least number of properties cannot be enforced, if it cannot: a grammar cannot tell whether a name that is not
/// listed has been written before, and twice the same is one property.
pub(super) fn uncounted(map: &Map<String, Value>) -> Option<String> {
    let least = map.get("minProperties").and_then(Value::as_u64)?;
    let required = map.get("required").and_then(Value::as_array);
    let certain = required.map_or(0, |names| names.len() as u64) + 1;
    let patterns = map.get("patternProperties").and_then(Value::as_object);
    let free = patterns.is_some_and(|p| !p.is_empty())
        || map.get("additionalProperties") != Some(&Value::Bool(false));
    (free && least > certain).then(|| {
        format!(
            "expected at most {certain}, one more than are required, together with names that are not listed, found {least}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn multiples_are_bounded_alone_and_together() {
        let taken = |schemas: &[Value]| {
            let mut multiples = Multiples::default();
            let alone = schemas
                .iter()
                .filter_map(|s| multiples.unbounded(s.as_object().unwrap()))
                .count();
            (alone, multiples.unbounded_together().is_some())
        };
        let multiple_of = |multiple: f64| json!({"multipleOf": multiple});
        let all = json!({"allOf": []});
        assert_eq!(
            taken(&[multiple_of(10_000.0), multiple_of(0.01), multiple_of(0.5)]),
            (0, false)
        );
        assert_eq!(
            taken(&[multiple_of(10_001.0), multiple_of(0.000_012_34)]),
            (2, false)
        );
        assert_eq!(
            taken(&[multiple_of(4_294_967_295.0), multiple_of(1e300)]),
            (2, false)
        );
        // Side by side they are apart, put together they are one.
        assert_eq!(
            taken(&[multiple_of(9_999.0), multiple_of(9_998.0)]),
            (0, false)
        );
        assert_eq!(
            taken(&[multiple_of(9_999.0), multiple_of(9_998.0), all.clone()]),
            (0, true)
        );
        assert_eq!(
            taken(&[multiple_of(1000.0), multiple_of(0.01), all.clone()]),
            (0, true)
        );
        assert_eq!(
            taken(&[multiple_of(6.0), multiple_of(0.5), multiple_of(4.0), all]),
            (0, false)
        );
    }

    #[test]
    fn properties_are_counted_where_their_names_are_listed() {
        for (schema, counted) in [
            (
                json!({"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": false}),
                true,
            ),
            (json!({"minProperties": 1}), true),
            (json!({"minProperties": 2}), false),
            (json!({"minProperties": 2, "required": ["a"]}), true),
            (
                json!({"minProperties": 2, "patternProperties": {"a": {}}, "additionalProperties": false}),
                false,
            ),
        ] {
            let found = uncounted(schema.as_object().unwrap());
            assert_eq!(found.is_none(), counted, "{schema}: {found:?}");
        }
    }
}
