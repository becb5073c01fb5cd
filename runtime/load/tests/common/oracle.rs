//! A drafter that knows texts.

use nq_runtime::interface::Draft;
use nq_runtime::{Drafter, Result, Speculation};
use std::sync::{Arc, Mutex};

/// What each slot's text will be, prompt included.
pub(crate) type Futures = Arc<Mutex<Vec<Vec<u32>>>>;

/// Says what a text has at a place, and something else at some places.
struct Oracle {
    texts: Futures,
    wrong_in: usize,
    free: bool,
    reads: bool,
}

impl Drafter for Oracle {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        let texts = self.texts.lock().unwrap();
        for draft in drafts {
            let (text, at) = (&texts[draft.slot], draft.text.len());
            let rest = text.iter().enumerate().skip(at).take(draft.most);
            let guess = |(i, &token): (usize, &u32)| match i.is_multiple_of(self.wrong_in) {
                true => (token + 1) % 40,
                false => token,
            };
            draft.tokens = rest.map(guess).collect();
        }
        Ok(())
    }

    fn is_free(&self) -> bool {
        self.free
    }

    fn reads_streams(&self) -> bool {
        self.reads
    }
}

/// Drafts by `texts`; one of `wrong_in` tokens is wrong, with 1 all are.
pub(crate) fn oracle(texts: &Futures, wrong_in: usize, free: bool) -> Speculation {
    Speculation::new(Box::new(Oracle {
        texts: texts.clone(),
        wrong_in,
        free,
        reads: false,
    }))
}

/// The same, by a drafter that reads the streams of every step.
pub(crate) fn reading_oracle(texts: &Futures, wrong_in: usize) -> Speculation {
    Speculation::new(Box::new(Oracle {
        texts: texts.clone(),
        wrong_in,
        free: false,
        reads: true,
    }))
}
