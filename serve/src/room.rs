//! How the memory that is free for sequences is divided: among models and, within one, between keys and values and
//! snapshots of recurrences' states.

use nq_formats::human_bytes;
use nq_kernels::pages::PAGE;
use nq_runtime::{DeviceMemory, SessionSpec};
use std::fmt;

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
struct SessionBytes {
    /// A page of keys and values.
    page: u64,
    /// A snapshot of a sequence's states; 0 without recurrences.
    snapshot: u64,
    /// The states of all slots.
    states: u64,
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
    /// Bytes that others will take of a computer's memory: images.
    pub beside: u64,
    /// Models that share the memory.
    pub models: u64,
    /// Requests at once.
    pub parallel: usize,
}

/// What a model's sequences get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    /// Bytes that all models may use.
    usable: u64,
    /// Bytes for this one's keys and values, if no others are given.
    share: u64,
    /// Snapshots.
    snapshots: u64,
    /// Pages.
    pages: usize,
    /// Positions of a sequence.
    ctx: usize,
}

impl Room {
    /// Divides `free` bytes, of a GPU or of the computer, which has other uses for its memory.
    fn new(free: u64, on_gpu: bool, bytes: SessionBytes, wanted: Wanted) -> Self {
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

/// The session in which a model serves.
#[derive(Clone, Copy, Debug)]
pub struct ServedSession {
    /// Its size.
    pub spec: SessionSpec,
    /// Bytes of its pages and states, and of those of a drafter.
    pub bytes: u64,
}

impl ServedSession {
    /// Plans the number and length of sequences, the pages and the snapshots of sessions that are otherwise as `least`, of an
    /// engine that takes what `engine` says ([`Engine::device_memory`](nq_runtime::Engine::device_memory)), beside sessions of
    /// a drafter, which take what `drafts` says.
    ///
    /// # Errors
    /// [`RoomError`] for a sequence that does not fit, for sizes in `wanted` that are no use or not there, and for an engine
    /// that does not say what memory a session takes.
    pub fn plan(
        engine: impl Fn(&SessionSpec) -> Option<DeviceMemory>,
        least: &SessionSpec,
        drafts: impl Fn(&SessionSpec) -> DeviceMemory,
        wanted: Wanted,
    ) -> Result<Self, RoomError> {
        let spec = |ctx: usize, pages: usize, snapshots: usize| SessionSpec {
            ctx,
            pages: Some(pages),
            snapshots: Some(snapshots),
            ..*least
        };
        let memory = |spec: &SessionSpec| engine(spec).ok_or(RoomError::Unknown);
        let bytes = |pages: usize, snapshots: usize| {
            let spec = spec(PAGE, pages, snapshots);
            // A drafter has a page for each.
            Ok((memory(&spec)?.kv + drafts(&spec).kv) as u64)
        };
        let one = bytes(1, 0)?;
        let (page, snapshot) = (bytes(2, 0)? - one, bytes(1, 1)? - one);
        let bytes = SessionBytes {
            page,
            snapshot,
            states: one - page,
        };
        let beside = usize::try_from(wanted.beside).unwrap_or(usize::MAX);
        let room = |whole: &SessionSpec| {
            let device = memory(whole)?;
            let taken = match device.on_host {
                false => device.scratch + drafts(whole).scratch,
                true => beside,
            };
            let free = device.free.saturating_sub(taken) as u64;
            let room = Room::new(free, !device.on_host, bytes, wanted);
            room.check(free, !device.on_host, bytes, wanted)?;
            Ok::<_, RoomError>(room)
        };
        let spec_in = |room: &Room, ctx: usize| {
            let snapshots = usize::try_from(room.snapshots).unwrap_or(usize::MAX);
            spec(ctx, room.pages, snapshots)
        };
        let longest = wanted.ctx.unwrap_or(wanted.trained);
        // What a session takes besides grows with its pages: first as if it had one, then as if it had the most.
        let most = room(&spec(longest, 1, 0))?;
        let room = room(&spec_in(&most, longest))?;
        Ok(ServedSession {
            spec: spec_in(&room, room.ctx),
            bytes: page * room.pages as u64 + bytes.states + room.snapshots * snapshot,
        })
    }
}

impl Room {
    /// Refuses room that is too little for a sequence, and sizes in `wanted` that are no use or not there.
    fn check(
        &self,
        free: u64,
        on_gpu: bool,
        bytes: SessionBytes,
        wanted: Wanted,
    ) -> Result<(), RoomError> {
        let less = |given: &u64| (1..bytes.snapshot).contains(given);
        if let Some(given) = wanted.state_memory.filter(less) {
            return Err(RoomError::Useless(format!(
                "--state-memory: a state takes {}, and {} are there for it: nothing could be drafted, and no \
                 prompt kept; 0 asks for that, and a larger one helps",
                human_bytes(bytes.snapshot),
                human_bytes(given)
            )));
        }
        let short = |needed, free, help| {
            let help = Some(help);
            Err(RoomError::Short { needed, free, help })
        };
        let pages = self.ctx.div_ceil(PAGE);
        if self.pages < pages || self.pages == 0 {
            let one = bytes.page * pages.max(1) as u64;
            let room = wanted.kv_memory.unwrap_or(self.share);
            let what = format!(
                "a sequence of {} tokens takes {} of keys and values, and {} are there for them: a \
                 smaller --ctx or a larger --kv-memory helps",
                self.ctx.max(PAGE),
                human_bytes(one),
                human_bytes(room)
            );
            return match wanted.kv_memory {
                Some(_) => Err(RoomError::Useless(what)),
                None => short(one, room, what),
            };
        }
        if let Some(given) = wanted.kv_memory.filter(|&given| given > free && !on_gpu) {
            let what = format!(
                "--kv-memory: {} are free on this machine",
                human_bytes(free)
            );
            return short(given, free, what);
        }
        if let Some(given) = wanted.state_memory.filter(|&given| given > self.usable) {
            let what = format!(
                "--state-memory: {} are free for it",
                human_bytes(self.usable)
            );
            return short(given, self.usable, what);
        }
        Ok(())
    }
}

/// Why there is no room for a model's sequences.
#[derive(Debug)]
pub enum RoomError {
    /// The engine does not say what memory a session takes.
    Unknown,
    /// A size that was given is too small to be of use.
    Useless(String),
    /// Memory is short.
    Short {
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that are there.
        free: u64,
        /// What it is that does not fit, with a remedy, if one is known.
        help: Option<String>,
    },
}

impl fmt::Display for RoomError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoomError::Unknown => {
                f.write_str("the device does not say what memory a session takes")
            }
            RoomError::Useless(what) => f.write_str(what),
            RoomError::Short {
                help: Some(help), ..
            } => f.write_str(help),
            RoomError::Short { needed, free, .. } => write!(
                f,
                "this needs {} of memory, and {} are free",
                human_bytes(*needed),
                human_bytes(*free)
            ),
        }
    }
}

impl std::error::Error for RoomError {}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    const WANTED: Wanted = Wanted {
        kv_memory: None,
        state_memory: None,
        ctx: None,
        trained: 40_960,
        beside: 0,
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

    /// A GPU of which hardly more is free than activations take, which grow with the pages.
    #[test]
    fn what_grows_with_pages_has_room_too() {
        let memory = |spec: &SessionSpec| DeviceMemory {
            kv: 100_000 * spec.page_count(),
            scratch: 110_000_000 + 30_000 * spec.page_count(),
            free: 121_000_000,
            ..DeviceMemory::default()
        };
        let least = SessionSpec::of_one(PAGE, 1);
        let none = |_: &SessionSpec| DeviceMemory::default();
        let served = ServedSession::plan(|s| Some(memory(s)), &least, none, WANTED).unwrap();
        let taken = memory(&served.spec);
        assert!(taken.kv + taken.scratch <= taken.free, "{taken:?}");
        assert!(served.spec.page_count() > 60, "{:?}", served.spec);
    }
}
