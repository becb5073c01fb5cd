//! Which experts deserve rooms: those with the most heat, which is the number of their choices, of which each counts half as
//! much after every [`HALF_LIFE`] readings (LRFU: Lee et al. 2001, <https://doi.org/10.1109/TC.2001.970573>). A short half-life keeps
//! what was chosen last, as LRU does, a long one what is chosen most.

/// Readings of the counts after which a choice counts half.
const HALF_LIFE: f32 = 16.0;

/// So many times as hot as the expert in a room must another one be to get it: experts of like heat would swap forever.
const MARGIN: f32 = 1.1;

/// Heat of a model's experts.
pub(super) struct Heat {
    /// [layers, experts], each as of reading `at`.
    heat: Vec<f32>,
    experts: usize,
    /// What a choice counts at the latest reading: older heat stays as it is, and newer choices count more.
    unit: f32,
    hits: u64,
    all: u64,
}

/// An expert that shall have a room, and how much hotter it is than the one there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Swap {
    pub(super) layer: usize,
    pub(super) expert: usize,
    pub(super) room: usize,
    pub(super) gain: f32,
}

impl Heat {
    /// No heat yet, of so many layers of so many experts.
    pub(super) fn new(layers: usize, experts: usize) -> Self {
        Heat {
            heat: vec![0.0; layers * experts],
            experts,
            unit: 1.0,
            hits: 0,
            all: 0,
        }
    }

    /// Keeps `expert` of a layer in its room for good.
    pub(super) fn keep(&mut self, layer: usize, expert: usize) {
        self.heat[layer * self.experts + expert] = f32::INFINITY;
    }

    /// Takes the number of choices of all experts so far, modulo 2^32; `before` are the last ones, and become these.
    /// `in_room` says which are in rooms, for [`Heat::hits`].
    pub(super) fn take(
        &mut self,
        counts: &[u32],
        before: &mut [u32],
        in_room: impl Fn(usize) -> bool,
    ) {
        self.unit *= (std::f32::consts::LN_2 / HALF_LIFE).exp();
        if self.unit > 1e20 {
            self.heat.iter_mut().for_each(|h| *h /= self.unit);
            self.unit = 1.0;
        }
        let each = self.heat.iter_mut().zip(counts).zip(before);
        for (i, ((heat, &now), before)) in each.enumerate() {
            let chosen = now.wrapping_sub(*before);
            *before = now;
            *heat += chosen as f32 * self.unit;
            self.all += u64::from(chosen);
            self.hits += if in_room(i) { u64::from(chosen) } else { 0 };
        }
    }

    /// The hottest experts of a layer without a room that are hotter than the coolest with one, at most `most`, each with
    /// the room of one of these. The layer has `experts`; `rooms` says which of them is in which room.
    pub(super) fn swaps(
        &self,
        layer: usize,
        experts: usize,
        rooms: &[usize],
        most: usize,
    ) -> Vec<Swap> {
        let heat = &self.heat[layer * self.experts..][..experts];
        let mut inside = vec![false; experts];
        rooms.iter().for_each(|&e| inside[e] = true);
        let mut swaps = Vec::new();
        let mut taken = vec![false; rooms.len()];
        for _ in 0..most {
            let outside = (0..experts).filter(|&e| !inside[e]);
            let hottest = outside.max_by(|&a, &b| heat[a].total_cmp(&heat[b]));
            let free = (0..rooms.len()).filter(|&r| !taken[r]);
            let coolest = free.min_by(|&a, &b| heat[rooms[a]].total_cmp(&heat[rooms[b]]));
            let (Some(expert), Some(room)) = (hottest, coolest) else {
                break;
            };
            let gain = heat[expert] - heat[rooms[room]] * MARGIN;
            if gain <= 0.0 {
                break;
            }
            (inside[expert], taken[room]) = (true, true);
            swaps.push(Swap {
                layer,
                expert,
                room,
                gain,
            });
        }
        swaps
    }

    /// How many choices found their expert in a room, and how many there were.
    pub(super) fn hits(&self) -> (u64, u64) {
        (self.hits, self.all)
    }
}
