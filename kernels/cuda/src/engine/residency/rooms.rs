//! The rooms of a layer's experts on the GPU, and what is in them.
//!
//! An expert that comes needs a room that no queued work reads. So that it need not wait for one, a few are empty: it is
//! copied there at once, and when it has arrived, the coolest expert of the layer leaves, whose room is empty as soon as the
//! work that was queued before has ended.

/// What a room is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// Nobody reads it.
    Empty,
    /// This expert is on its way to it.
    Coming(usize),
    /// Work reads this expert here.
    Held(usize),
    /// Work that was queued may read the expert that was here.
    Left,
}

/// The rooms of a layer.
#[derive(Clone, Debug)]
pub(super) struct LayerRooms {
    rooms: Vec<Room>,
}

impl LayerRooms {
    /// So many rooms, all of them empty.
    pub(super) fn new(rooms: usize) -> Self {
        LayerRooms {
            rooms: vec![Room::Empty; rooms],
        }
    }

    /// How many of so many rooms hold experts, so that some are empty for those to come. One room alone keeps its expert.
    pub(super) fn held_of(rooms: usize) -> usize {
        rooms
            - match rooms {
                0 | 1 => 0,
                2..=23 => 1,
                _ => 2,
            }
    }

    /// Experts that are read in rooms, each with its room.
    pub(super) fn held(&self) -> impl Iterator<Item = (usize, usize)> {
        let rooms = self.rooms.iter().enumerate();
        rooms.filter_map(|(room, is)| match *is {
            Room::Held(expert) => Some((expert, room)),
            _ => None,
        })
    }

    /// Experts on their way to rooms.
    pub(super) fn coming(&self) -> impl Iterator<Item = usize> {
        self.rooms.iter().filter_map(|is| match *is {
            Room::Coming(expert) => Some(expert),
            _ => None,
        })
    }

    /// How many rooms are empty.
    pub(super) fn empty(&self) -> usize {
        self.rooms.iter().filter(|r| **r == Room::Empty).count()
    }

    /// The room that `expert` is copied to from now on; `None` without an empty one.
    pub(super) fn fill(&mut self, expert: usize) -> Option<usize> {
        let room = self.rooms.iter().position(|r| *r == Room::Empty)?;
        self.rooms[room] = Room::Coming(expert);
        Some(room)
    }

    /// The expert that has come to `room`, which is read there from now on.
    pub(super) fn arrive(&mut self, room: usize) -> Option<usize> {
        let Room::Coming(expert) = self.rooms[room] else {
            return None;
        };
        self.rooms[room] = Room::Held(expert);
        Some(expert)
    }

    /// Lets the coolest of the experts that are read in rooms leave, by the heat of the layer's experts, but for those of
    /// endless heat and for `but`. Returns it with its room.
    pub(super) fn leave(&mut self, heat: &[f32], but: usize) -> Option<(usize, usize)> {
        let others = self
            .held()
            .filter(|&(e, _)| e != but && heat[e].is_finite());
        let (expert, room) = others.min_by(|a, b| heat[a.0].total_cmp(&heat[b.0]))?;
        self.rooms[room] = Room::Left;
        Some((expert, room))
    }

    /// Nobody reads `room` any more.
    pub(super) fn forget(&mut self, room: usize) {
        self.rooms[room] = Room::Empty;
    }

    /// Puts `expert` in the place of what is in `room`, where nobody reads it.
    pub(super) fn put(&mut self, room: usize, expert: usize) {
        self.rooms[room] = Room::Held(expert);
    }
}
