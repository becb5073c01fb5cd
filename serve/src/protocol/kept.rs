//! Responses that are kept for a while, so that later requests may refer to them: `previous_response_id`
//! continues one, `item_reference` names an item of one.
//!
//! A client sees its own alone. Room is bounded for all and for each client; the oldest go first. Nothing is
//! written to disk, and a restart forgets all.

use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most bytes of all that is kept, as JSON text.
const MOST_BYTES: usize = 128 << 20;
/// Most bytes of what is kept for one client.
const MOST_BYTES_OF_ONE: usize = 32 << 20;
/// Most responses of one client.
const MOST_OF_ONE: usize = 256;

/// A response that is kept.
#[derive(Clone, Debug)]
struct KeptResponse {
    owner: u64,
    id: String,
    /// All items of the conversation up to its end: its input and its output.
    items: Vec<Item>,
    /// How many of them are its input.
    input: usize,
    /// The response as it was sent, as JSON text.
    whole: String,
    bytes: usize,
}

/// An item of a conversation: its id, if it has one, and its JSON text, which is smaller than a tree.
#[derive(Clone, Debug)]
pub struct Item {
    id: Option<Arc<str>>,
    text: Arc<str>,
}

impl Item {
    /// An item as it is kept.
    pub fn new(item: &Value) -> Self {
        Item {
            id: item["id"].as_str().map(Arc::from),
            text: item.to_string().into(),
        }
    }

    fn bytes(&self) -> usize {
        size_of::<Item>() + self.text.len() + self.id.as_ref().map_or(0, |id| id.len())
    }

    /// The item.
    pub fn value(&self) -> Value {
        // The text is that of a value.
        serde_json::from_str(&self.text).unwrap_or_default()
    }
}

/// The responses that are kept, the oldest first.
#[derive(Debug, Default)]
pub struct KeptResponses(Mutex<VecDeque<KeptResponse>>);

impl KeptResponses {
    fn list(&self) -> MutexGuard<'_, VecDeque<KeptResponse>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response with the items that led to it, unless it alone is larger than a client's room.
    pub fn keep(&self, owner: u64, whole: &Value, input: Vec<Item>) {
        let (input, mut items) = (input.len(), input);
        let output = whole["output"].as_array().into_iter().flatten();
        items.extend(output.map(Item::new));
        let text = whole.to_string();
        // Items are counted with every response that has them, so that the sum is never too small.
        let response = KeptResponse {
            owner,
            id: whole["id"].as_str().unwrap_or_default().to_owned(),
            bytes: items.iter().map(Item::bytes).sum::<usize>() + text.len(),
            items,
            input,
            whole: text,
        };
        if response.bytes > MOST_BYTES_OF_ONE {
            return;
        }
        let mut list = self.list();
        list.push_back(response);
        let own = |list: &VecDeque<KeptResponse>| {
            let own = list.iter().filter(|r| r.owner == owner);
            own.fold((0, 0), |(n, bytes), r| (n + 1, bytes + r.bytes))
        };
        while let (n, bytes) = own(&list)
            && (n > MOST_OF_ONE || bytes > MOST_BYTES_OF_ONE)
        {
            match list.iter().position(|r| r.owner == owner) {
                Some(oldest) => list.remove(oldest),
                None => break,
            };
        }
        while list.iter().map(|r| r.bytes).sum::<usize>() > MOST_BYTES {
            list.pop_front();
        }
    }

    /// The items of the conversation up to the end of a client's response.
    pub fn conversation(&self, owner: u64, id: &str) -> Option<Vec<Item>> {
        let list = self.list();
        let found = list.iter().find(|r| r.owner == owner && r.id == id)?;
        Some(found.items.clone())
    }

    /// The items that led to a client's response.
    pub fn input(&self, owner: u64, id: &str) -> Option<Vec<Item>> {
        let list = self.list();
        let found = list.iter().find(|r| r.owner == owner && r.id == id)?;
        Some(found.items[..found.input].to_vec())
    }

    /// A client's response as it was sent, as JSON text.
    pub fn whole(&self, owner: u64, id: &str) -> Option<String> {
        let list = self.list();
        let found = list.iter().find(|r| r.owner == owner && r.id == id)?;
        Some(found.whole.clone())
    }

    /// Forgets a client's response; false if it is not there.
    pub fn forget(&self, owner: u64, id: &str) -> bool {
        let mut list = self.list();
        let before = list.len();
        list.retain(|r| !(r.owner == owner && r.id == id));
        list.len() < before
    }

    /// All items of a client's responses by their ids.
    pub fn items(&self, owner: u64) -> HashMap<Arc<str>, Item> {
        let list = self.list();
        let own = list.iter().filter(|r| r.owner == owner);
        let items = own.flat_map(|r| &r.items);
        let named = items.filter_map(|i| Some((i.id.clone()?, i.clone())));
        named.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn response(id: &str, text: &str) -> Value {
        json!({"id": id, "output": [{"type": "message", "id": format!("msg_{id}"), "text": text}]})
    }

    #[test]
    fn a_client_sees_its_own_and_can_forget_it() {
        let kept = KeptResponses::default();
        kept.keep(
            1,
            &response("a", "x"),
            vec![Item::new(&json!({"role": "user"}))],
        );
        assert_eq!(kept.conversation(1, "a").unwrap().len(), 2);
        assert!(kept.conversation(2, "a").is_none() && kept.whole(2, "a").is_none());
        assert_eq!(kept.items(1)["msg_a"].value()["text"], "x");
        assert!(kept.items(2).is_empty());
        assert!(!kept.forget(2, "a") && kept.forget(1, "a") && !kept.forget(1, "a"));
        assert!(kept.whole(1, "a").is_none());
    }

    #[test]
    fn the_oldest_go_where_room_is_short() {
        let kept = KeptResponses::default();
        for i in 0..MOST_OF_ONE + 5 {
            kept.keep(1, &response(&i.to_string(), "x"), Vec::new());
        }
        assert!(kept.whole(1, "4").is_none() && kept.whole(1, "5").is_some());
        // Large ones of many clients: each keeps within its room, and all within theirs.
        let large = "x".repeat(MOST_BYTES_OF_ONE / 5);
        for client in 2..8 {
            for i in 0..4 {
                kept.keep(client, &response(&i.to_string(), &large), Vec::new());
            }
            let own = kept
                .list()
                .iter()
                .filter(|r| r.owner == client)
                .map(|r| r.bytes)
                .sum::<usize>();
            assert!(own > 0 && own <= MOST_BYTES_OF_ONE, "{own}");
            assert!(kept.whole(client, "3").is_some());
        }
        assert!(kept.list().iter().map(|r| r.bytes).sum::<usize>() <= MOST_BYTES);
        assert!(kept.whole(1, "100").is_none());
        kept.keep(
            9,
            &response("b", &"x".repeat(MOST_BYTES_OF_ONE)),
            Vec::new(),
        );
        assert!(kept.whole(9, "b").is_none());
    }
}
