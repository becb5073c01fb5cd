//! Attention over pages that sequences share, read once for all of them.

use super::attention::{Case, LAYER, Uploaded, new_cache, step_bounds};
use super::{GUARD, finish, gpu, guarded, is_sanitizing};
use half::f16;
use nq_cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, Cascade, Checked, DevicePages, Gpu,
    HEAD_DIM, PageEntry, Row, Step, Stream, operand_index,
};
use nq_kernels::pages::{KvType, PAGE, SharedPrefix};
use nq_testkit::compare::nmse;

/// Rows at positions of one case's sequence: each in its own slot, with its first `pages` pages
/// shared with another slot.
struct Together<'a> {
    gpu: &'a Gpu,
    stream: Stream,
    case: &'a Case,
    on_device: Uploaded,
    positions: Vec<usize>,
    prefixes: Vec<SharedPrefix>,
}

impl Together<'_> {
    /// The number of pages that the row shares with another.
    fn pages(&self, row: usize) -> usize {
        let sharing = self.prefixes.iter().find(|p| p.rows.contains(&row));
        sharing.map_or(0, |p| p.pages)
    }

    /// A cache that holds the positions before each row's.
    fn fill(&self) -> DevicePages {
        let (case, m) = (self.case, self.positions.len());
        let mut cache = new_cache(self.gpu, &self.stream, case, m);
        let each = case.len.div_ceil(PAGE);
        let mut entries = Vec::new();
        for prefix in &self.prefixes {
            for &slot in &prefix.rows {
                entries.extend((0..prefix.pages).map(|index| PageEntry {
                    slot,
                    index,
                    // The same assignment as `new_cache`.
                    page: (m * each - 1 - (index * m + prefix.slot)) as u32,
                }));
            }
        }
        self.stream.set_pages(&mut cache, &entries).unwrap();
        let mut rows = Vec::new();
        for (slot, &position) in self.positions.iter().enumerate() {
            let is_first = self.prefixes.iter().any(|p| p.slot == slot);
            let from = if is_first { 0 } else { self.pages(slot) * PAGE };
            rows.extend((from..position).map(|position| Row {
                position: position as i32,
                slot: slot as i32,
                ..Row::default()
            }));
        }
        let width = case.width();
        let row = |r: &Row| &case.qkv[r.position as usize * width..][..width];
        let qkv: Vec<f32> = rows.iter().flat_map(row).copied().collect();
        let mut qkv = self.gpu.upload("a test", &qkv).unwrap();
        let places = Checked::upload(self.gpu, "a test", &rows, cache.places()).unwrap();
        let heads = self.on_device.settings();
        (self.stream)
            .append(&mut qkv, &places, &heads, cache.layer(LAYER), rows.len())
            .unwrap();
        cache
    }

    /// The attention of each row, by steps that read shared pages once, or row by row.
    fn attend(&self, cascades: bool, halves: bool) -> Vec<f32> {
        let (case, m) = (self.case, self.positions.len());
        let (heads, kv_heads) = (case.heads, case.kv_heads);
        let cache = self.fill();
        let bounds = step_bounds(&cache);
        let mut cascade = Cascade::new(self.gpu, m, cache.places()).unwrap();
        let each = heads / kv_heads;
        let prefixes = if cascades { &self.prefixes[..] } else { &[] };
        let prefixes_shape = cascade
            .write(&self.stream, prefixes, each, kv_heads)
            .unwrap();
        assert_eq!(prefixes_shape.is_some(), cascades);
        let steps: Vec<Step> = (self.positions.iter().enumerate())
            .map(|(slot, &position)| Step {
                position: position as i32,
                slot: slot as i32,
                ..Step::default()
            })
            .collect();
        let step = Checked::upload(self.gpu, "a test", &steps, bounds).unwrap();
        let width = case.width();
        let of_row = |&p: &usize| &case.qkv[p * width..][..width];
        let qkv: Vec<f32> = self.positions.iter().flat_map(of_row).copied().collect();
        let qkv = self.gpu.upload("a test", &qkv).unwrap();
        let mut scratch = AttentionScratch::new(self.gpu, heads, kv_heads, m).unwrap();
        let longest = self.positions.iter().max().unwrap() + 1;
        let shape = AttentionShape {
            m,
            splits: AttentionScratch::splits(self.gpu, kv_heads, m, longest),
            holds_dependents: false,
            runs: false,
            shared: prefixes_shape.map(|shape| (&cascade, shape)),
        };
        let settings = self.on_device.settings();
        let mut run = |out: AttentionOutput<'_>| {
            let layer = cache.layer(LAYER);
            (self.stream)
                .attention_decode(&qkv, &step, &settings, layer, &mut scratch, out, shape)
                .unwrap();
        };
        let out_width = heads * HEAD_DIM;
        if halves {
            let padded = out_width.next_multiple_of(256);
            let mut half: Buffer<u16> = self.gpu.zeros("a test", m * padded).unwrap();
            run(AttentionOutput::Half(&mut half));
            self.stream.synchronize().unwrap();
            let mut values = vec![0u16; m * padded];
            half.read(0, &mut values).unwrap();
            let value = |row: usize, i: usize| values[row * padded + operand_index(i)];
            let of_row = |row| (0..out_width).map(move |i| f16::from_bits(value(row, i)).to_f32());
            return (0..m).flat_map(of_row).collect();
        }
        let mut out = guarded(self.gpu, &vec![GUARD; m * out_width]);
        run(AttentionOutput::Full(&mut out));
        let first = finish(&self.stream, &out);
        run(AttentionOutput::Full(&mut out));
        assert!(finish(&self.stream, &out) == first, "not the same again");
        first
    }
}

/// Groups of rows of several sizes, next to rows without a group, compared with the host and with
/// rows that are read one by one.
#[test]
fn shared_pages() {
    let Some(gpu) = gpu() else { return };
    let prefix = |slot, pages, rows: &[usize]| SharedPrefix {
        slot,
        pages,
        rows: rows.to_vec(),
    };
    let cases = [
        // Heads, key heads, positions of rows, groups.
        ((4, 2), vec![130, 200, 128], vec![prefix(0, 1, &[0, 1, 2])]),
        (
            (8, 1),
            vec![700, 5, 650, 384, 300, 701],
            vec![prefix(2, 5, &[0, 2, 5]), prefix(3, 2, &[3, 4])],
        ),
        // More query heads than a block supports.
        (
            (16, 2),
            (0..20).map(|i| 260 + 7 * i).collect(),
            vec![prefix(4, 2, &(0..20).collect::<Vec<_>>())],
        ),
    ];
    for kv in [KvType::F16, KvType::Int8] {
        if !Cascade::fits(&gpu, kv) {
            continue;
        }
        let both = [Case::new, Case::biased].into_iter();
        let all = both.flat_map(|new| cases.clone().into_iter().map(move |case| (new, case)));
        for (new, ((heads, kv_heads), positions, prefixes)) in all {
            if positions.len() > 3 && is_sanitizing() {
                continue;
            }
            let case = new(heads, kv_heads, kv, positions.iter().max().unwrap() + 1);
            let together = Together {
                gpu: &gpu,
                stream: gpu.stream().unwrap(),
                on_device: Uploaded::new(&gpu, &case),
                case: &case,
                positions: positions.clone(),
                prefixes,
            };
            let expected = case.expected(&positions);
            let name = format!("{kv} heads {heads}/{kv_heads}, {} rows", positions.len());
            let found = together.attend(true, false);
            let tolerance = if kv == KvType::Int8 { 2e-5 } else { 1e-6 };
            let error = nmse(&found, &expected);
            assert!(error < tolerance, "{name}: {error:e}");
            let alone = nmse(&found, &together.attend(false, false));
            assert!(alone < 1e-9, "{name}: {alone:e} from rows one by one");
            let error = nmse(&together.attend(true, true), &expected);
            assert!(error < tolerance + 1e-6, "{name} in FP16: {error:e}");
        }
    }
}

#[test]
fn groups_outside_the_cache_are_refused() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let case = Case::new(4, 2, KvType::F16, 2 * PAGE);
    let cache = new_cache(&gpu, &stream, &case, 2);
    let mut cascade = Cascade::new(&gpu, 3, cache.places()).unwrap();
    let mut write = |slot, pages, rows: Vec<usize>, heads| {
        let prefix = SharedPrefix { slot, pages, rows };
        cascade
            .write(&stream, &[prefix], heads, 2)
            .map(|written| written.is_some())
    };
    assert_eq!(write(1, 2, vec![0, 2], 2).ok(), Some(true));
    assert!(write(3, 2, vec![0, 1], 2).is_err());
    assert!(write(1, 3, vec![0, 1], 2).is_err());
    assert!(write(1, 2, vec![0, 3], 2).is_err());
    assert!(write(1, 2, vec![0, 1], 9).is_err());
}
