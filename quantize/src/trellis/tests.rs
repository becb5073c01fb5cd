use super::*;
use nq_formats::trellis::state;

/// Uniform random words.
pub(super) fn random(n: usize, seed: u64) -> Vec<u32> {
    let mut state = seed;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    std::iter::repeat_with(next).take(n).collect()
}

pub(super) fn gaussians(n: usize, seed: u64) -> Vec<f32> {
    let unit = |w: u32| (f64::from(w) + 0.5) / 4_294_967_296.0;
    let pair = |w: &[u32]| {
        let radius = (-2.0 * unit(w[0]).ln()).sqrt();
        let angle = std::f64::consts::TAU * unit(w[1]);
        [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
    };
    random(n, seed).chunks_exact(2).flat_map(pair).collect()
}

/// The values of whole sequences.
fn decode(scheme: TrellisScheme, words: &[u32]) -> Vec<f32> {
    let (code, bits) = (scheme.code(), scheme.step_bits() as usize);
    let sequences = words.chunks_exact(scheme.words());
    let steps = sequences.flat_map(|words| {
        (0..scheme.steps()).map(move |step| code.values(state(words, (step + 1) * bits)))
    });
    steps
        .flat_map(|v| v.into_iter().take(code.width()))
        .collect()
}

fn squared(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    squares.sum::<f64>()
}

/// Values that a stream stands for are found again.
#[test]
fn round_trips() {
    for scheme in TrellisScheme::all() {
        let words = random(5 * scheme.words(), 7);
        let values = decode(scheme, &words);
        let (mut rounded, mut found) = (values.clone(), vec![u32::MAX; words.len()]);
        Trellis::new(scheme).encode(&mut rounded, &mut found);
        assert_eq!(values, rounded, "{scheme}");
        assert_eq!(values, decode(scheme, &found), "{scheme}");
    }
}

/// The errors that docs/lab/trellis.md states.
#[test]
fn squared_errors_of_gaussians() {
    let expected = [
        0.0696, 0.0177, 0.00448, 0.00115, 0.000305, // sums of 2 to 6 bits
        0.0711, 0.0364, 0.0187, 0.00959, 0.00507, 0.00146, // pairs of 4 to 8 and of 10
    ];
    let weights = gaussians(64 * SEQUENCE, 3);
    for (scheme, expected) in TrellisScheme::all().zip(expected) {
        let trellis = Trellis::new(scheme);
        let targets: Vec<f32> = weights.iter().map(|w| w / trellis.unit()).collect();
        let (mut rounded, mut words) = (targets.clone(), vec![0; 64 * scheme.words()]);
        trellis.encode(&mut rounded, &mut words);
        assert_eq!(rounded, decode(scheme, &words), "{scheme}");
        let unit = f64::from(trellis.unit());
        let error = squared(&targets, &rounded) * unit * unit / weights.len() as f64;
        let what = format!("{scheme}: {error}, expected {expected}");
        assert!((error / expected - 1.0).abs() < 0.05, "{what}");
        // No code does better than this.
        assert!(
            error > 0.95 * 4f64.powf(-f64::from(scheme.bits())),
            "{what}"
        );
    }
}

/// The least squared distance of a path from tail `seam` to it again, by looking at all states one by one.
fn least_from(scheme: TrellisScheme, targets: &[f32], seam: usize) -> f64 {
    let (code, bits) = (scheme.code(), scheme.step_bits());
    let tails = 1 << (16 - bits);
    let mut costs = vec![f64::INFINITY; tails];
    costs[seam] = 0.0;
    for x in targets.chunks_exact(code.width()) {
        let mut next = vec![f64::INFINITY; tails];
        for state in 0..=u16::MAX {
            let before = costs[usize::from(state) >> bits];
            let cost = before + squared(x, &code.values(state)[..code.width()]);
            let to = &mut next[usize::from(state) % tails];
            *to = to.min(cost);
        }
        costs = next;
    }
    costs[seam]
}

/// The second pass finds the best of the paths that have the seam which the first one chose.
#[test]
fn finds_the_best_path() {
    for scheme in TrellisScheme::all() {
        let trellis = Trellis::new(scheme);
        let targets: Vec<f32> = gaussians(SEQUENCE, 11)
            .iter()
            .map(|w| w / trellis.unit())
            .collect();
        let (mut rounded, mut words) = (targets.clone(), vec![0; scheme.words()]);
        trellis.encode(&mut rounded, &mut words);
        let last = state(&words, 32 * words.len());
        let seam = usize::from(last) % (1 << (16 - scheme.step_bits()));
        let least = least_from(scheme, &targets, seam);
        let found = squared(&targets, &rounded);
        assert!(found < 1.001 * least, "{scheme}: {found}, least {least}");
        assert!(found > 0.9999 * least, "{scheme}: {found}, least {least}");
    }
}

#[test]
fn neighbours_and_threads_change_nothing() {
    let scheme = TrellisScheme::new(Code::Octagon, 8).unwrap();
    let trellis = Trellis::new(scheme);
    let values = gaussians(6 * SEQUENCE, 5);
    let encode = |values: &[f32]| {
        let mut words = vec![0; values.len() / SEQUENCE * scheme.words()];
        trellis.encode(&mut values.to_vec(), &mut words);
        words
    };
    let all = encode(&values);
    let one: Vec<u32> = values.chunks_exact(SEQUENCE).flat_map(&encode).collect();
    assert_eq!(all, one);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    assert_eq!(all, pool.install(|| encode(&values)));
}

#[test]
#[should_panic(expected = "expected 16 for each 128")]
fn refuses_parts_of_sequences() {
    let scheme = TrellisScheme::new(Code::Sum, 4).unwrap();
    Trellis::new(scheme).encode(&mut [0.0; SEQUENCE + 8], &mut [0; 17]);
}
