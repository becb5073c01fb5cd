//! Pages of lists, as OpenAI's and Anthropic's APIs cut them.

use crate::error::ApiError;
use crate::protocol::reading::plain;
use serde_json::{Value, json};

/// Most entries of a page.
const MOST: usize = 1000;

/// Which part of a list a client asks for.
#[derive(Debug)]
pub(super) struct Paging {
    limit: usize,
    descending: bool,
    after: Option<String>,
    before: Option<String>,
}

impl Paging {
    /// Reads a query: `limit`, `order` (`asc` or `desc`), `after` and `before`, which Anthropic calls `after_id` and
    /// `before_id`. What is not there is `limit` and, if `descending`, the last one first.
    ///
    /// # Errors
    /// Another value.
    pub(super) fn read(
        query: Option<&str>,
        limit: usize,
        descending: bool,
    ) -> Result<Self, ApiError> {
        let mut paging = Paging {
            limit,
            descending,
            after: None,
            before: None,
        };
        for pair in query.unwrap_or_default().split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "limit" => {
                    let limit = value.parse().ok().filter(|n| (1..=MOST).contains(n));
                    paging.limit = limit.ok_or_else(|| {
                        let what = format!("expected 1 to {MOST}, found {}", plain(value));
                        ApiError::field("limit", what)
                    })?;
                }
                "order" => {
                    paging.descending = match value {
                        "asc" => false,
                        "desc" => true,
                        _ => {
                            let what = format!("expected asc or desc, found {}", plain(value));
                            return Err(ApiError::field("order", what));
                        }
                    }
                }
                "after" | "after_id" => paging.after = Some(value.to_owned()),
                "before" | "before_id" => paging.before = Some(value.to_owned()),
                _ => {}
            }
        }
        Ok(paging)
    }

    /// A page of objects with ids.
    ///
    /// # Errors
    /// A page behind or before an object that is not there.
    pub(super) fn cut(&self, mut list: Vec<Value>) -> Result<Value, ApiError> {
        if self.descending {
            list.reverse();
        }
        let place = |name: &str, id: &str| {
            let found = list.iter().position(|entry| entry["id"] == id);
            found.ok_or_else(|| {
                let what = format!("expected an id of the list, found {}", plain(id));
                ApiError::field(name, what)
            })
        };
        let begin = match &self.after {
            Some(id) => place("after", id)? + 1,
            None => 0,
        };
        let end = match &self.before {
            Some(id) => place("before", id)?,
            None => list.len(),
        };
        let all = list.get(begin..end).unwrap_or_default();
        // Before an entry are those next to it.
        let (page, has_more) = match all.len().checked_sub(self.limit) {
            None | Some(0) => (all, false),
            Some(more) if self.before.is_some() => (&all[more..], true),
            Some(_) => (&all[..self.limit], true),
        };
        let id = |entry: Option<&Value>| entry.map(|entry| entry["id"].clone());
        Ok(json!({
            "data": page, "first_id": id(page.first()), "last_id": id(page.last()), "has_more": has_more,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_cut_as_they_are_asked_for() {
        let list: Vec<Value> = (0..5).map(|i| json!({"id": i.to_string()})).collect();
        let cut = |query: &str| Paging::read(Some(query), 3, true)?.cut(list.clone());
        for (query, ids, more) in [
            ("", "4 3 2", true),
            ("order=asc", "0 1 2", true),
            ("after=2", "1 0", false),
            ("after=2&limit=1", "1", true),
            ("order=asc&before_id=4&limit=2", "2 3", true),
            ("after=0", "", false),
        ] {
            let page = cut(query).unwrap();
            let found: Vec<&str> = page["data"]
                .as_array()
                .unwrap()
                .iter()
                .map(|e| e["id"].as_str().unwrap())
                .collect();
            assert_eq!(
                (found.join(" "), &page["has_more"]),
                (ids.into(), &json!(more)),
                "{query}"
            );
            assert_eq!(page["last_id"].as_str(), found.last().copied(), "{query}");
        }
        for query in ["limit=0", "limit=x", "order=up", "after=9"] {
            assert_eq!(cut(query).unwrap_err().status, 400, "{query}");
        }
    }
}
