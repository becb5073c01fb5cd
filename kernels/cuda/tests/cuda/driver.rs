//! Copies, graphs and memory: errors, waiting, and lifetimes.

use super::{dense, gpu, pack};
use nq_cuda::{CopiedRows, Version};
use nq_cuda::{GemvOutput, Gpu, HostWork, Norm, Stack, Strided, table};
use nq_model::DType;
use std::sync::Arc;
use std::time::Duration;

/// Rows go from one place to another, in a stream and in a graph; what is beside them stays.
#[test]
fn rows_are_copied() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let values: Vec<f32> = (0..40).map(|i| i as f32).collect();
    let from = gpu.upload("a test", &values).unwrap();
    let strided = |at, stride| Strided { at, stride };
    for recorded in [false, true] {
        let mut to = gpu.upload("a test", &[-1f32; 30]).unwrap();
        let mut copy = || {
            stream.copy_rows(CopiedRows {
                from: &from,
                begin: strided(3, 9),
                to: &mut to,
                end: strided(1, 7),
                rows: 4,
                width: 5,
            })
        };
        match recorded {
            false => copy().unwrap(),
            true => {
                let graph = stream.record(&mut copy).unwrap();
                stream.run(&graph).unwrap();
            }
        }
        stream.synchronize().unwrap();
        let mut found = [0f32; 30];
        to.read(0, &mut found).unwrap();
        for (at, &found) in found.iter().enumerate() {
            let (row, column) = (at.wrapping_sub(1) / 7, at.wrapping_sub(1) % 7);
            let expected = match at > 0 && row < 4 && column < 5 {
                true => (3 + 9 * row + column) as f32,
                false => -1.0,
            };
            assert_eq!(found, expected, "value {at}");
        }
        // Nothing of no rows, past no end, and no row into the next one.
        let mut copy = |from_at, to_at, rows, width| {
            stream.copy_rows(CopiedRows {
                from: &from,
                begin: strided(from_at, 9),
                to: &mut to,
                end: strided(to_at, 7),
                rows,
                width,
            })
        };
        copy(50, 50, 0, 5).unwrap();
        copy(9, 1, 4, 5).unwrap_err();
        copy(3, 5, 4, 5).unwrap_err();
        copy(3, 1, 3, 8).unwrap_err();
    }
}

/// Values put in a stream are in order with the work before and after, whatever happens to the
/// host's values afterwards.
#[test]
fn values_are_put_in_order() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut to = gpu.zeros::<[u32; 3]>("a test", 5).unwrap();
    for round in 0..100u32 {
        for at in 0..4 {
            let value = [round, at as u32, round ^ 0xffff];
            stream.put(&mut to, at, &[value]).unwrap();
        }
    }
    assert!(stream.put(&mut to, 4, &[[0; 3]; 2]).is_err());
    stream.synchronize().unwrap();
    let mut found = [[0; 3]; 5];
    to.read(0, &mut found).unwrap();
    let put = |at: u32| [99, at, 99 ^ 0xffff];
    assert_eq!(found, [put(0), put(1), put(2), put(3), [0; 3]]);
}

#[test]
fn memory_is_read_at_a_likely_rate() {
    let Some(gpu) = gpu() else { return };
    let rate = gpu.read_bandwidth(1 << 28).unwrap();
    assert!((1e10..1e14).contains(&rate), "{rate:e} bytes a second");
}

/// Host values are those copied, without explicit waiting, in two streams in turn.
#[test]
fn pinned_values_are_there_when_looked_at() {
    const N: usize = 1 << 20;
    let Some(gpu) = gpu() else { return };
    let streams = [gpu.stream().unwrap(), gpu.stream().unwrap()];
    let mut host = gpu.pinned::<u32>("a test", N).unwrap();
    let mut device = gpu.zeros::<u32>("a test", 2 * N).unwrap();
    for round in 0..6u32 {
        let stream = &streams[round as usize % 2];
        let values = host.values_mut().unwrap();
        values
            .iter_mut()
            .enumerate()
            .for_each(|(i, v)| *v = round ^ i as u32);
        stream.write(&mut device, N, &mut host, 0..N).unwrap();
        // Copied again after that, to the same host values.
        stream.read(&device, N - 1, &mut host, 0..N).unwrap();
        let values = host.values().unwrap();
        assert_eq!((values[0], values[1]), (0, round));
        assert_eq!(values[N - 1], round ^ (N as u32 - 2));
    }
    assert!(
        streams[0]
            .write(&mut device, 0, &mut host, 1..N + 1)
            .is_err()
    );
    assert!(
        streams[0]
            .write(&mut device, N + 1, &mut host, 0..N)
            .is_err()
    );
    assert!(streams[0].read(&device, 0, &mut host, 0..N + 1).is_err());
    // Dropped while it is copied to: freeing waits.
    streams[0].read(&device, 0, &mut host, 0..N).unwrap();
    drop(host);
}

/// A graph runs after everything recorded in it was dropped; copies cannot be recorded.
#[test]
fn graphs_share_in_their_memory() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let w = pack(&gpu, &[&dense(DType::F16, 32, 256, 3)], Stack::Concat);
    let x = gpu.upload("a test", &[1f32; 256]).unwrap();
    let gain = gpu.upload("a test", &[1f32; 256]).unwrap();
    let mut y = gpu.zeros::<f32>("a test", 32).unwrap();
    let product = |y: &mut _| {
        let norm = Norm {
            gain: &gain,
            eps: 1e-6,
        };
        stream.gemv(&w, &x, GemvOutput::Store(Some(norm), y), false)
    };
    product(&mut y).unwrap(); // loads the kernel
    let graph = stream.record(|| product(&mut y)).unwrap();
    let mut host = gpu.pinned::<f32>("a test", 32).unwrap();
    let copied = stream.record(|| stream.read(&y, 0, &mut host, 0..32));
    let refusal = copied.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(refusal.contains("recorded"), "{refusal}");
    drop((w, x, gain, y));
    stream.run(&graph).unwrap();
    stream.synchronize().unwrap();
    drop(graph);
    // The recorded function may fail or panic: the stream then works on.
    let mut to = gpu.zeros::<u32>("a test", 1).unwrap();
    let fails = stream.record(|| stream.put(&mut to, 9, &[0]));
    assert!(fails.is_err());
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.record(|| panic!("a test")).is_ok()
    }));
    assert!(caught.is_err());
    stream.put(&mut to, 0, &[7]).unwrap();
    stream.synchronize().unwrap();
    let mut found = [0];
    to.read(0, &mut found).unwrap();
    assert_eq!(found, [7]);
}

/// Memory of another device is refused.
#[test]
fn devices_do_not_mix() {
    let Some(gpu) = gpu() else { return };
    let Ok(other) = Gpu::open(1) else {
        println!("skipped: there is one GPU");
        return;
    };
    let stream = gpu.stream().unwrap();
    let mut there = other.zeros::<u32>("a test", 4).unwrap();
    let mut here = gpu.zeros::<u32>("a test", 4).unwrap();
    let mut host = other.pinned::<u32>("a test", 4).unwrap();
    assert!(stream.put(&mut there, 0, &[1]).is_err());
    assert!(stream.read(&there, 0, &mut host, 0..4).is_err());
    assert!(stream.write(&mut here, 0, &mut host, 0..4).is_err());
    let theirs = other.stream().unwrap();
    theirs.put(&mut there, 0, &[1]).unwrap();
    let graph = theirs.record(|| theirs.put(&mut there, 0, &[1])).unwrap();
    assert!(stream.run(&graph).is_err());
}

/// The driver knows every kernel of the table for which this device has code, with arguments of the
/// size given in the table.
#[test]
fn the_table_is_the_device_s() {
    let Some(gpu) = gpu() else { return };
    let mut absent = Vec::new();
    for row in table() {
        for (i, name) in row.instances.iter().enumerate() {
            if !gpu.has(row, i).unwrap() {
                absent.push(*name);
            }
        }
    }
    // Products by warpgroups, in whose names an x parts the sizes of a block, and what only newer GPUs have.
    let some_lack = ["norm_step", "gemv_rows"];
    let only_hopper = |n: &&str| n.contains('x') || some_lack.iter().any(|s| n.starts_with(s));
    // Those by single warps of more rows than 16, in whose place a Hopper has them.
    let of_warps = |n: &&str| {
        n.starts_with("gemm_") && !n.contains('x') && (n.ends_with("_64") || n.ends_with("_128"))
    };
    if gpu.info().capability == Version::new(9, 0) {
        assert!(absent.iter().all(of_warps), "{absent:?}")
    } else {
        assert!(absent.iter().all(only_hopper), "{absent:?}")
    }
    if gpu.info().driver < 12_040 {
        println!("skipped: sizes of arguments, which this driver does not tell");
    }
}

/// Work of the CPU sees what was queued before it and is seen by what comes after, queued and recorded;
/// a panic makes NaN.
#[test]
fn the_cpu_works_in_the_order_of_the_stream() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let mut x = gpu.upload("a test", &[1f32, 2.0, 3.0, 4.0]).unwrap();
    let y = gpu.upload("a test", &[10f32, 20.0]).unwrap();
    let work: Arc<HostWork> = Arc::new(|x: &mut [f32], y: &[f32]| {
        std::thread::sleep(Duration::from_millis(5));
        x.iter_mut()
            .zip(y.iter().cycle())
            .for_each(|(x, y)| *x += y);
        assert!(x[0] < 1000.0, "a test");
    });
    let mut found = [0f32; 4];
    {
        let stage = gpu.host_stage("a test", 5).unwrap();
        for _ in 0..3 {
            stream.on_host(&stage, &work, &mut x, 3, &y, 2).unwrap();
        }
        let graph = stream
            .record(|| stream.on_host(&stage, &work, &mut x, 3, &y, 1))
            .unwrap();
        for _ in 0..4 {
            stream.run(&graph).unwrap();
        }
        assert!(stream.on_host(&stage, &work, &mut x, 4, &y, 2).is_err());
        stream.synchronize().unwrap();
        x.read(0, &mut found).unwrap();
        assert_eq!(found, [71.0, 102.0, 73.0, 4.0]);
        drop(stage);
        // The graph has its own share of the memory.
        stream.run(&graph).unwrap();
        stream.synchronize().unwrap();
        x.read(0, &mut found).unwrap();
        assert_eq!(found, [81.0, 112.0, 83.0, 4.0]);
    }
    let stage = gpu.host_stage("a test", 5).unwrap();
    stream.put(&mut x, 0, &[1e6]).unwrap();
    stream.on_host(&stage, &work, &mut x, 3, &y, 2).unwrap();
    drop(stage);
    x.read(0, &mut found).unwrap();
    assert!(
        found[..3].iter().all(|v| v.is_nan()) && found[3] == 4.0,
        "{found:?}"
    );
}
