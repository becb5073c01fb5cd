//! Which experts deserve rooms: those with the most heat, which is the number of their choices, of which each counts
//! half as much after every [`HALF_LIFE`] readings (LRFU: Lee et al. 2001, <https://doi.org/10.1109/TC.2001.970573>).
//! A short half-life keeps what was chosen last, as LRU does, a long one what is chosen most.

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
            *before = now;
            // A prompt chooses hundreds of times at once, and must not outweigh a hundred steps.
            *heat += (1.0 + chosen as f32).log2() * self.unit;
            self.all += u64::from(chosen);
            self.hits += if in_room(i) { u64::from(chosen) } else { 0 };
        }
    }

    /// The hottest experts of a layer without a room that are hotter than the coolest with one, at most `most`, each
    /// with the room of one of these. The layer has `experts`; `rooms` says which of them is in which room.
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

#[cfg(test)]
mod tests {
    use super::*;
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

    /// The share of choices that find their expert, when swaps take `delay` readings, and the swaps of a token.
    fn replayed(all: &[Vec<usize>], experts: usize, rooms: usize, delay: usize) -> (f64, f64) {
        let mut heat = Heat::new(1, experts);
        let mut rooms: Vec<usize> = (0..rooms).collect();
        let (mut counts, mut before) = (vec![0u32; experts], vec![0; experts]);
        let mut coming: Vec<(usize, usize)> = Vec::new();
        let mut swapped = 0;
        for (at, chosen) in all.iter().enumerate() {
            coming.retain(|&(when, _)| when > at);
            let away: Vec<usize> = coming.iter().map(|c| c.1).collect();
            chosen.iter().for_each(|&e| counts[e] += 1);
            let here = |e: usize| rooms.contains(&e) && !away.contains(&e);
            heat.take(&counts, &mut before, here);
            if coming.is_empty() {
                for swap in heat.swaps(0, experts, &rooms, 2) {
                    rooms[swap.room] = swap.expert;
                    coming.push((at + delay, swap.expert));
                    swapped += 1;
                }
            }
        }
        let (hits, choices) = heat.hits();
        let tokens = all.len() as f64;
        assert_eq!(choices, (all.len() * all[0].len()) as u64);
        (hits as f64 / choices as f64, f64::from(swapped) / tokens)
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
            let [rooms, _, hits, swaps] = row[..] else {
                panic!("{row:?}");
            };
            let found =
                (1..4).map(|seed| replayed(&text(600, 128, 8, seed), 128, rooms as usize, 3));
            let (all, moved) = found.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            let (found, moved) = (all / 3.0, moved / 3.0);
            assert!(
                (found - hits).abs() < 6e-4,
                "{rooms} rooms: {found:.3} found"
            );
            assert!(
                (moved - swaps).abs() < 6e-3,
                "{rooms} rooms: {moved:.2} swaps"
            );
            // The first experts, for good, would be found as often as there are rooms.
            assert!(found >= rooms / 128.0 && moved < 0.8, "{rooms} rooms");
        }
    }

    #[test]
    fn swaps_are_of_the_hottest_and_the_coolest_and_never_of_one_that_is_kept() {
        let mut heat = Heat::new(2, 6);
        heat.keep(1, 5);
        let counts = [0, 0, 0, 0, 0, 0, 9, 1, 0, 5, 3, 0];
        heat.take(&counts, &mut [0; 12], |_| false);
        assert_eq!(heat.hits(), (0, 18));
        assert!(heat.swaps(0, 6, &[0, 1], 6).is_empty());
        let swaps = heat.swaps(1, 6, &[5, 1, 2], 6);
        let found: Vec<_> = swaps.iter().map(|s| (s.layer, s.expert, s.room)).collect();
        assert_eq!(found, [(1, 0, 2), (1, 3, 1)]);
        assert_eq!(heat.swaps(1, 6, &[5, 1, 2], 1), swaps[..1]);
        // Of a layer with fewer experts, there are no others.
        assert!(heat.swaps(1, 3, &[0, 1], 6).is_empty());
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
        assert_eq!(again.swaps(0, 4, &[0, 3], 2), heat_per_unit(&heat));
    }

    /// The swaps of [`heat_goes_on_where_it_was`], whose heat counts from the latest reading on.
    fn heat_per_unit(heat: &Heat) -> Vec<Swap> {
        let swaps = heat.swaps(0, 4, &[0, 3], 2).into_iter();
        let gain = |swap: Swap| Swap {
            gain: swap.gain / heat.unit,
            ..swap
        };
        swaps.map(gain).collect()
    }

    /// Counts start again at 0 after 2^32, and heat of long ago is forgotten.
    #[test]
    fn counts_wrap_and_heat_fades() {
        let mut heat = Heat::new(1, 2);
        let mut before = [u32::MAX - 1, 0];
        heat.take(&[2, 0], &mut before, |_| true);
        assert_eq!((heat.hits(), before), ((4, 4), [2, 0]));
        for _ in 0..2000 {
            heat.take(&[2, 0], &mut before, |_| true);
        }
        heat.take(&[2, 1], &mut before, |_| true);
        let swaps = heat.swaps(0, 2, &[0], 1);
        assert_eq!(swaps.len(), 1, "{swaps:?}");
        assert!(swaps[0].gain.is_finite());
    }
}
