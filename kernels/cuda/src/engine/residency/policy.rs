//! Which experts deserve rooms: those with the most heat, which is the number of their choices, of which each counts
//! half as much after every [`HALF_LIFE`] readings (LRFU: Lee et al. 2001, <https://doi.org/10.1109/TC.2001.970573>).
//! A short half-life keeps what was chosen last, as LRU does, a long one what is chosen most.

use super::rooms::LayerRooms;

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
    /// [layers]
    hits: Vec<Hits>,
}

/// How many choices of a layer's experts found them in rooms, and how many there were, without those that are kept there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hits {
    pub(super) in_room: u64,
    pub(super) all: u64,
}

/// An expert that shall have a room, and how much hotter it is than the one that leaves for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Wanted {
    pub(super) layer: usize,
    pub(super) expert: usize,
    pub(super) gain: f32,
}

impl Heat {
    /// No heat yet, of so many layers of so many experts.
    pub(super) fn new(layers: usize, experts: usize) -> Self {
        Heat {
            heat: vec![0.0; layers * experts],
            experts,
            unit: 1.0,
            hits: vec![Hits::default(); layers],
        }
    }

    /// Keeps `expert` of a layer in its room for good.
    pub(super) fn keep(&mut self, layer: usize, expert: usize) {
        self.heat[layer * self.experts + expert] = f32::INFINITY;
    }

    /// Heat of the first `experts` of each layer, as [`Heat::restore`] takes it.
    pub(super) fn values(&self, experts: usize) -> Vec<f32> {
        let layers = self.heat.chunks(self.experts.max(1));
        let heat = layers.flat_map(|layer| &layer[..experts]);
        heat.map(|heat| heat / self.unit).collect()
    }

    /// Begins with the heat of the first `experts` of each layer, `[layers, experts]`.
    pub(super) fn restore(&mut self, values: &[f32], experts: usize) {
        let layers = self.heat.chunks_mut(self.experts.max(1));
        for (layer, values) in layers.zip(values.chunks(experts.max(1))) {
            layer[..values.len()].copy_from_slice(values);
        }
        self.unit = 1.0;
    }

    /// The `most` hottest of a layer's `experts`, of equals the first.
    pub(super) fn hottest(&self, layer: usize, experts: usize, most: usize) -> Vec<usize> {
        let heat = &self.heat[layer * self.experts..][..experts];
        let mut hottest: Vec<usize> = (0..experts).collect();
        hottest.sort_by(|&a, &b| heat[b].total_cmp(&heat[a]));
        hottest.truncate(most);
        hottest
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
            if chosen == 0 {
                continue;
            }
            *before = now;
            if heat.is_infinite() {
                continue; // a shared one, which nobody chooses
            }
            // A prompt chooses hundreds of times at once, and must not outweigh a hundred steps.
            *heat += (1.0 + chosen as f32).log2() * self.unit;
            let hits = &mut self.hits[i / self.experts];
            hits.all += u64::from(chosen);
            hits.in_room += if in_room(i) { u64::from(chosen) } else { 0 };
        }
    }

    /// The heat of a layer's experts.
    pub(super) fn of_layer(&self, layer: usize) -> &[f32] {
        &self.heat[layer * self.experts..][..self.experts]
    }

    /// The hottest of a layer's `experts` that are neither in its `rooms` nor on their way there, and hotter than those that
    /// would leave for them: at most as many as rooms are empty.
    pub(super) fn wanted(&self, layer: usize, experts: usize, rooms: &LayerRooms) -> Vec<Wanted> {
        let heat = &self.of_layer(layer)[..experts];
        let mut inside = vec![false; experts];
        let mut cool: Vec<f32> = Vec::new();
        for (expert, _) in rooms.held() {
            inside[expert] = true;
            cool.push(heat[expert]);
        }
        let mut coming = 0;
        for expert in rooms.coming() {
            inside[expert] = true;
            coming += 1;
        }
        cool.sort_unstable_by(f32::total_cmp);
        let mut wanted = Vec::new();
        // The coolest leave for those that are coming already.
        for cool in cool.into_iter().skip(coming).take(rooms.empty()) {
            let outside = (0..experts).filter(|&e| !inside[e]);
            let hottest = outside.max_by(|&a, &b| heat[a].total_cmp(&heat[b]));
            let Some((expert, gain)) = hottest.map(|e| (e, heat[e] - cool * MARGIN)) else {
                break;
            };
            if gain <= 0.0 {
                break;
            }
            inside[expert] = true;
            wanted.push(Wanted {
                layer,
                expert,
                gain,
            });
        }
        wanted
    }

    /// The hits of each layer.
    pub(super) fn hits(&self) -> &[Hits] {
        &self.hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::path::Path;

    /// Experts that the tokens of a text choose, as published traces have them: about half of the choices repeat one
    /// of the token before, and more than four of five one of the last eight.
    fn text(tokens: usize, experts: u32, chosen: usize, seed: u64) -> Vec<Vec<usize>> {
        let mut state = seed;
        let mut random = move |below: u32| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) as u32 % below) as usize
        };
        let mut all: Vec<Vec<usize>> = Vec::new();
        for at in 0..tokens {
            let mut own = Vec::new();
            while own.len() < chosen {
                let ago = match random(100) {
                    0..45 => 1,
                    45..80 => 2 + random(7),
                    80..95 => 9 + random(56),
                    _ => usize::MAX,
                };
                let expert = match at.checked_sub(ago) {
                    Some(then) => all[then][random(chosen as u32)],
                    None => random(experts),
                };
                if !own.contains(&expert) {
                    own.push(expert);
                }
            }
            all.push(own);
        }
        all
    }

    /// Steps that are queued when the choices of one are known, and those after which an expert has come.
    const QUEUED: usize = 2;
    const COPIED: usize = 1;

    /// Rooms that hold the first experts.
    fn rooms_of_first(rooms: usize) -> LayerRooms {
        let mut all = LayerRooms::new(rooms);
        (0..LayerRooms::held_of(rooms)).for_each(|e| all.put(e, e));
        all
    }

    /// The share of choices that find their expert, and the experts that move for a token.
    fn replayed(all: &[Vec<usize>], experts: usize, rooms: usize) -> (f64, f64) {
        let mut heat = Heat::new(1, experts);
        let mut rooms = rooms_of_first(rooms);
        let table = |rooms: &LayerRooms| {
            let mut table = vec![false; experts];
            rooms.held().for_each(|(e, _)| table[e] = true);
            table
        };
        let mut tables: VecDeque<_> = (0..QUEUED).map(|_| table(&rooms)).collect();
        let (mut counts, mut before) = (vec![0u32; experts], vec![0; experts]);
        // Rooms, and when they change.
        let (mut coming, mut left) = (Vec::new(), Vec::new());
        let mut moved = 0;
        for (at, chosen) in all.iter().enumerate() {
            left.retain(|&(when, room)| {
                let passed = when <= at;
                if passed {
                    rooms.forget(room);
                }
                !passed
            });
            chosen.iter().for_each(|&e| counts[e] += 1);
            let followed = tables.pop_front().unwrap();
            heat.take(&counts, &mut before, |e| followed[e]);
            coming.retain(|&(when, room)| {
                let passed = when <= at;
                if let Some(expert) = passed.then(|| rooms.arrive(room)).flatten() {
                    moved += 1;
                    let leaves = rooms.leave(heat.of_layer(0), expert);
                    left.extend(leaves.map(|(_, room)| (at + QUEUED - 1, room)));
                }
                !passed
            });
            for wanted in heat.wanted(0, experts, &rooms) {
                let room = rooms.fill(wanted.expert);
                coming.extend(room.map(|room| (at + COPIED, room)));
            }
            tables.push_back(table(&rooms));
        }
        let hits = heat.hits()[0];
        let tokens = all.len() as f64;
        assert_eq!(hits.all, (all.len() * all[0].len()) as u64);
        let found = hits.in_room as f64 / hits.all as f64;
        (found, f64::from(moved) / tokens)
    }

    /// The share found if each expert that is missed had a room at once, in the place of the one that is last in `order` of
    /// those there; `order` is called with a token's place in the text and an expert.
    fn found_at_once(
        all: &[Vec<usize>],
        rooms: usize,
        order: impl Fn(usize, usize) -> usize,
    ) -> f64 {
        let mut inside: Vec<usize> = (0..rooms).collect();
        let mut found = 0;
        for (at, chosen) in all.iter().enumerate() {
            let (here, missed): (Vec<usize>, Vec<usize>) =
                chosen.iter().partition(|e| inside.contains(e));
            found += here.len();
            inside.extend(missed);
            inside.sort_by_key(|&e| order(at, e));
            inside.truncate(rooms);
        }
        found as f64 / (all.len() * all[0].len()) as f64
    }

    /// What was chosen longest ago leaves, or what will not be chosen for longest, which no policy exceeds (Belady 1966,
    /// <https://doi.org/10.1147/sj.52.0078>).
    fn least_recent_and_best(all: &[Vec<usize>], rooms: usize) -> (f64, f64) {
        let never = all.len() + 1;
        let chosen = |at: &usize, expert: usize| all[*at].contains(&expert);
        let ago = |at: usize, e: usize| {
            let last = (0..=at).rev().find(|then| chosen(then, e));
            last.map_or(never, |last| at - last)
        };
        let ahead = |at: usize, e: usize| {
            let next = (at + 1..all.len()).find(|then| chosen(then, e));
            next.unwrap_or(never)
        };
        let recent = found_at_once(all, rooms, ago);
        (recent, found_at_once(all, rooms, ahead))
    }

    /// From this record `nq fit` computes speeds.
    #[test]
    fn what_a_text_needs_gets_the_rooms() {
        let record = "../../benches/records/2026-11-30-expert-hits.csv";
        let record = Path::new(env!("CARGO_MANIFEST_DIR")).join(record);
        let record = std::fs::read_to_string(record).unwrap();
        let rows = record.lines().filter(|line| !line.starts_with('#')).skip(1);
        for row in rows {
            let row: Vec<f64> = row.split(',').map(|cell| cell.parse().unwrap()).collect();
            let [rooms, _, hits, swaps, recent, best] = row[..] else {
                panic!("{row:?}");
            };
            let mut means = [0.0; 4];
            for text in (1..4).map(|seed| text(600, 128, 8, seed)) {
                let (found, moved) = replayed(&text, 128, rooms as usize);
                let others = least_recent_and_best(&text, rooms as usize);
                let each = [found, moved, others.0, others.1];
                means
                    .iter_mut()
                    .zip(each)
                    .for_each(|(mean, one)| *mean += one / 3.0);
            }
            let [found, moved, at_once, most] = means;
            assert!(
                (at_once - recent).abs() < 6e-4 && (most - best).abs() < 6e-4,
                "{rooms} rooms: {at_once:.3}, at most {most:.3}"
            );
            assert!(
                (found - hits).abs() < 6e-4,
                "{rooms} rooms: {found:.3} found"
            );
            assert!(
                (moved - swaps).abs() < 6e-3,
                "{rooms} rooms: {moved:.2} swaps"
            );
            // The first experts, for good, would be found as often as there are rooms, and some are empty.
            assert!(
                found >= (rooms - 2.0) / 128.0 && moved < 0.8,
                "{rooms} rooms"
            );
        }
    }

    #[test]
    fn the_hottest_come_for_the_coolest_and_never_for_one_that_is_kept() {
        let mut heat = Heat::new(2, 6);
        heat.keep(1, 5);
        let counts = [0, 0, 0, 0, 0, 0, 9, 1, 0, 5, 3, 0];
        heat.take(&counts, &mut [0; 12], |_| false);
        let hits = |all| Hits { in_room: 0, all };
        assert_eq!(heat.hits(), [hits(0), hits(18)]);
        assert!(heat.wanted(0, 6, &rooms_of_first(3)).is_empty());
        // Experts 5, 1 and 2, and two rooms for others.
        let mut rooms = LayerRooms::new(5);
        [5, 1, 2]
            .into_iter()
            .enumerate()
            .for_each(|(room, e)| rooms.put(room, e));
        let experts = |wanted: Vec<Wanted>| wanted.iter().map(|w| w.expert).collect::<Vec<_>>();
        assert_eq!(experts(heat.wanted(1, 6, &rooms)), [0, 3]);
        let room = rooms.fill(0).unwrap();
        assert_eq!(experts(heat.wanted(1, 6, &rooms)), [3]);
        assert_eq!(rooms.arrive(room), Some(0));
        assert_eq!(rooms.leave(heat.of_layer(1), 0), Some((2, 2)));
        // The room that 2 has left is not empty yet.
        assert_eq!((rooms.fill(3), rooms.fill(4)), (Some(4), None));
        rooms.forget(2);
        assert_eq!(rooms.fill(4), Some(2));
        assert_eq!(rooms.arrive(4), Some(3));
        assert_eq!(rooms.leave(heat.of_layer(1), 3), Some((1, 1)));
        // Of a layer with fewer experts, there are no others.
        assert!(heat.wanted(1, 3, &rooms_of_first(3)).is_empty());
    }

    #[test]
    fn heat_goes_on_where_it_was() {
        let mut heat = Heat::new(2, 4);
        heat.keep(0, 3);
        let mut before = [0; 8];
        for chosen in [1, 2, 3] {
            let counts = [0, 4 * chosen, chosen, 0, chosen, 0, 0, 0];
            heat.take(&counts, &mut before, |_| true);
        }
        let values = heat.values(3);
        assert_eq!(values.len(), 6);
        let mut again = Heat::new(2, 4);
        again.keep(0, 3);
        again.restore(&values, 3);
        assert_eq!(again.values(3), values);
        assert_eq!(again.hottest(0, 4, 3), [3, 1, 2]);
        assert_eq!(again.hottest(1, 3, 2), [0, 1]);
        let wanted = |heat: &Heat| {
            let mut rooms = LayerRooms::new(3);
            [0, 3]
                .into_iter()
                .enumerate()
                .for_each(|(room, e)| rooms.put(room, e));
            let wanted = heat.wanted(0, 4, &rooms).into_iter();
            wanted
                .map(|w| (w.expert, w.gain / heat.unit))
                .collect::<Vec<_>>()
        };
        assert_eq!(wanted(&again), wanted(&heat));
    }

    /// Counts start again at 0 after 2^32, and heat of long ago is forgotten.
    #[test]
    fn counts_wrap_and_heat_fades() {
        let mut heat = Heat::new(1, 2);
        let mut before = [u32::MAX - 1, 0];
        heat.take(&[2, 0], &mut before, |_| true);
        let hits = Hits { in_room: 4, all: 4 };
        assert_eq!((heat.hits(), before), (&[hits][..], [2, 0]));
        for _ in 0..2000 {
            heat.take(&[2, 0], &mut before, |_| true);
        }
        heat.take(&[2, 1], &mut before, |_| true);
        let wanted = heat.wanted(0, 2, &rooms_of_first(2));
        assert_eq!(wanted.len(), 1, "{wanted:?}");
        assert!(wanted[0].gain.is_finite());
    }
}
