//! How the memory that is free for sequences is divided: among models and, within one, between keys and values and
//! snapshots of recurrences' states.

use nq_kernels::pages::PAGE;

/// Slots that keep sequences for later prompts, per request in progress; and where each takes a state of fixed size,
/// which is large.
const KEPT_PER_REQUEST: usize = 4;
const KEPT_WITH_STATES: usize = 1;
/// Snapshots of such states at most, per request in progress, unless a size is given.
const SNAPSHOTS_PER_REQUEST: u64 = 4;
/// The part of the memory for sequences that snapshots take at most, unless a size is given.
const SNAPSHOTS_SHARE: u64 = 8;

/// Slots of a session that serves `parallel` requests at once, of a model with recurrences or without.
pub fn slots(parallel: usize, recurrent: bool) -> usize {
    let kept = match recurrent {
        true => KEPT_WITH_STATES,
        false => KEPT_PER_REQUEST,
    };
    parallel * (1 + kept)
}

/// What a session takes, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct SessionBytes {
    /// A page of keys and values.
    pub page: u64,
    /// A snapshot of a sequence's states; 0 without recurrences.
    pub snapshot: u64,
    /// The states of all slots.
    pub states: u64,
}

/// What decides how much a model's sequences get.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Bytes for keys and values, if they are given.
    pub kv_memory: Option<u64>,
    /// Bytes for snapshots, if they are given.
    pub state_memory: Option<u64>,
    /// Positions of a sequence, if they are given, and those that the model was trained for.
    pub ctx: Option<usize>,
    /// See [`Wanted::ctx`].
    pub trained: usize,
    /// Models that share the memory.
    pub models: u64,
    /// Requests at once.
    pub parallel: usize,
}

/// What a model's sequences get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that all models may use.
    pub usable: u64,
    /// Bytes for this one's keys and values, if no others are given.
    pub share: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Pages.
    pub pages: usize,
    /// Positions of a sequence.
    pub ctx: usize,
}

impl Room {
    /// Divides `free` bytes, of a GPU or of the computer, which has other uses for its memory.
    pub fn new(free: u64, on_gpu: bool, bytes: SessionBytes, wanted: Wanted) -> Self {
        let usable = if on_gpu { free / 10 * 9 } else { free / 5 * 2 };
        let share = (usable / wanted.models).saturating_sub(bytes.states);
        let snapshots = match (bytes.snapshot, wanted.state_memory) {
            (0, _) => 0,
            (one, Some(bytes)) => bytes / one,
            (one, None) => {
                let most = SNAPSHOTS_PER_REQUEST * wanted.parallel as u64;
                (share / SNAPSHOTS_SHARE / one).min(most)
            }
        };
        let share = share.saturating_sub(snapshots * bytes.snapshot);
        let longest = wanted.ctx.unwrap_or(wanted.trained);
        let most = (wanted.parallel * longest.div_ceil(PAGE)) as u64;
        let pages = match wanted.kv_memory {
            Some(given) => given / bytes.page,
            None => (share / bytes.page).min(most),
        };
        let pages = usize::try_from(pages)
            .unwrap_or(usize::MAX)
            .min(u32::MAX as usize);
        Room {
            usable,
            share,
            snapshots,
            pages,
            ctx: wanted
                .ctx
                .unwrap_or_else(|| wanted.trained.min(pages * PAGE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    const WANTED: Wanted = Wanted {
        kv_memory: None,
        state_memory: None,
        ctx: None,
        trained: 40_960,
        models: 1,
        parallel: 4,
    };

    /// Of a GPU nine tenths, of a computer two fifths, and no more than all requests can fill.
    #[test]
    fn sequences_get_a_part_of_what_is_free() {
        let bytes = SessionBytes {
            page: 10_000_000,
            snapshot: 0,
            states: 0,
        };
        let room = |free, on_gpu, wanted| Room::new(free, on_gpu, bytes, wanted);
        let found = room(10 * GB, true, WANTED);
        assert_eq!(
            (found.usable, found.pages, found.snapshots),
            (9 * GB, 900, 0)
        );
        assert_eq!(found.ctx, 40_960);
        assert_eq!(room(10 * GB, false, WANTED).pages, 400);
        assert_eq!(room(1000 * GB, true, WANTED).pages, 4 * 320);
        let two = room(
            10 * GB,
            true,
            Wanted {
                models: 2,
                ..WANTED
            },
        );
        assert_eq!((two.share, two.pages), (9 * GB / 2, 450));
        // What is given counts, whatever is free.
        let given = room(
            0,
            true,
            Wanted {
                kv_memory: Some(GB),
                ..WANTED
            },
        );
        assert_eq!((given.pages, given.ctx), (100, 12_800));
    }

    #[test]
    fn snapshots_get_an_eighth_or_what_is_given() {
        let bytes = SessionBytes {
            page: 10_000_000,
            snapshot: 50_000_000,
            states: GB,
        };
        let room = Room::new(10 * GB, true, bytes, WANTED);
        assert_eq!(
            (room.snapshots, room.pages),
            (4 * 4, (8 * GB - 16 * 50_000_000) as usize / 10_000_000)
        );
        let given = Wanted {
            state_memory: Some(GB),
            ..WANTED
        };
        assert_eq!(Room::new(10 * GB, true, bytes, given).snapshots, 20);
        assert_eq!((slots(4, true), slots(4, false)), (8, 20));
    }
}
