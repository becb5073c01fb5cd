// Sizes of a pass.
struct Step {
    rows: u32,        // rows of the pass
    tiles: u32,       // tiles of rows that attend together
    splits: u32,      // parts in which keys are read
    split_pages: u32, // pages in a part
    tiles_at: u32,    // where tiles, wanted rows and page tables begin in `batch`
    wanted_at: u32,
    tables_at: u32,
    turns_at: u32,    // where cosines and sines begin: [rows, half of the values of a head that turn, 2]
}
