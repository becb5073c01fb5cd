//! What reading a request finds beside its fields: names that nq does not know, and what it leaves out.

use super::sent::SentImage;
use crate::engine::Client;
use crate::error::ApiError;
use crate::protocol::kept::KeptResponses;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most names of either kind that one request may add.
const MOST: usize = 64;
/// Most bytes of a name that is repeated to others.
const MOST_NAME: usize = 64;

/// How the server reads requests.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// True: unknown names are refused.
    pub strict: bool,
    /// Most tokens of thinking in an answer.
    pub reasoning_budget: Option<usize>,
    /// Hosts that images are fetched from, in small letters.
    pub image_hosts: Vec<String>,
}

/// The reading of one request.
#[derive(Debug, Default)]
pub struct Reading {
    /// The server's rules.
    pub rules: Rules,
    /// Who asks.
    pub client: Client,
    /// Responses that clients may refer to.
    pub kept: Arc<KeptResponses>,
    noted: Mutex<Noted>,
    images: Mutex<Vec<SentImage>>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Noted {
    /// Names that no table has: `messages[].nonsense`.
    pub unknown: BTreeSet<String>,
    /// What is left out: `tools[4] web_search`.
    pub left_out: Vec<String>,
    /// The same as the model is told it: `the tool web_search`.
    pub told: Vec<String>,
}

impl Reading {
    /// A reading by these rules.
    pub(crate) fn new(rules: Rules, client: Client, kept: Arc<KeptResponses>) -> Self {
        Reading {
            rules,
            client,
            kept,
            noted: Mutex::default(),
            images: Mutex::default(),
        }
    }

    /// Notes an image, and returns its number.
    pub(crate) fn sent_image(&self, image: SentImage) -> usize {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        images.push(image);
        images.len() - 1
    }

    /// The images that were noted.
    pub(crate) fn take_images(&self) -> Vec<SentImage> {
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut images)
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was found so far.
    pub(crate) fn found(&self) -> Noted {
        self.noted().clone()
    }

    /// Notes a name that no table has.
    ///
    /// # Errors
    /// By strict rules, it is refused.
    pub(crate) fn unknown(&self, name: &str) -> Result<(), ApiError> {
        if self.rules.strict {
            let why = "nq does not know this parameter, and --strict refuses what it does not know";
            return Err(ApiError::unsupported(name, why));
        }
        let mut noted = self.noted();
        if noted.unknown.len() < MOST {
            noted.unknown.insert(plain(&without_places(name)));
        }
        Ok(())
    }

    /// Notes that `what` at `place` is left out; its place says it to the model, if it is in a text.
    pub(crate) fn left_out(&self, place: &str, what: &str) {
        let mut noted = self.noted();
        if noted.left_out.len() < MOST {
            let line = format!("{} {}", plain(place), plain(what));
            noted.left_out.push(line.trim_end().to_owned());
        }
    }

    /// Like [`Reading::left_out`], for what has no place in a text: the system message says it.
    pub(crate) fn left_out_and_told(&self, place: &str, what: &str, words: &str) {
        self.left_out(place, what);
        let mut noted = self.noted();
        let words = format!("{words} {}", plain(what)).trim_end().to_owned();
        if noted.told.len() < MOST && !noted.told.contains(&words) {
            noted.told.push(words);
        }
    }
}

/// A name without its places in lists: all `messages[3].x` are one.
fn without_places(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    let mut inside = false;
    for c in name.chars() {
        match c {
            '[' => (inside, _) = (true, out.push_str("[]")),
            ']' => inside = false,
            c if !inside => out.push(c),
            _ => {}
        }
    }
    out
}

/// A client's word as it may be in a log, a header and a metric: short, and of a few characters.
pub fn plain(text: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.[]:".contains(c);
    let chars = text.chars().map(|c| if fits(c) { c } else { '_' });
    chars.take(MOST_NAME).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_plain() {
        let reading = Reading::default();
        for i in 0..1000 {
            reading
                .unknown(&format!("messages[{i}].no\nsense"))
                .unwrap();
            reading.left_out_and_told(&format!("tools[{i}]"), "web search", "the tool");
        }
        let found = reading.found();
        assert_eq!(
            found.unknown,
            BTreeSet::from(["messages[].no_sense".to_owned()])
        );
        assert_eq!(found.left_out.len(), MOST);
        assert_eq!(found.left_out[1], "tools[1] web_search");
        assert_eq!(found.told, ["the tool web_search"]);
        for i in 0..1000 {
            reading
                .unknown(&format!("x{i}{}", "y".repeat(1000)))
                .unwrap();
        }
        let found = reading.found();
        assert_eq!(found.unknown.len(), MOST);
        assert!(found.unknown.iter().all(|n| n.len() <= MOST_NAME));
        let strict = Reading {
            rules: Rules {
                strict: true,
                ..Rules::default()
            },
            ..Reading::default()
        };
        assert_eq!(
            strict.unknown("a[0].b").unwrap_err().param.as_deref(),
            Some("a[0].b")
        );
    }
}
