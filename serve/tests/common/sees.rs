//! A small random model that sees, served.

use nq_answers::images::{Sight, SightOptions};
use nq_formats::Checkpoint;
use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions, SessionSpec, Tower};
use nq_serve::about::AboutTower;
use nq_serve::{EngineOptions, ServedModel};
use nq_testkit::sees::{tower, write};
use nq_testkit::sessions::session_spec;
use std::sync::Arc;

/// The model, served, with a context of 1,024 tokens.
pub fn model(options: EngineOptions) -> Arc<ServedModel> {
    seeing_by(options, |tower| tower)
}

/// The same with another tower in place of its own.
pub fn seeing_by(
    options: EngineOptions,
    other: impl Fn(Arc<dyn Tower>) -> Arc<dyn Tower> + Send + Sync + 'static,
) -> Arc<ServedModel> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sees");
    write(&path, tower);
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    let load = LoadOptions {
        device: DeviceChoice::Cpu,
        threads: Some(2),
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &load, &()).unwrap();
    let spec = SessionSpec {
        snapshots: Some(8),
        ..session_spec(2 * options.parallel, 1024, KvType::F32, 256)
    };
    let mut model = ServedModel::new("sees", &checkpoint, engine, spec, options).unwrap();
    let vision = checkpoint.vision().unwrap().clone();
    let about = AboutTower::of(&checkpoint, 40).unwrap();
    let open = move || {
        Ok(other(
            nq_load::tower(&checkpoint, &load, 4096, &())?.unwrap(),
        ))
    };
    let sight = Sight::new(vision, SightOptions::default(), open);
    sight.load().unwrap();
    model.set_sight(sight, about);
    Arc::new(model)
}
