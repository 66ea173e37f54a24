//! The product of two factors that is added to a matrix, and DoRA's scaling of the sums. Never reads a file.

/// A product's factors in row-major f32: A (rank, columns) and B (rows, rank).
pub struct LowRank {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
    columns: usize,
    scale: f32,
    /// The matrix is stored as its transpose, and so is the product.
    pub transposed: bool,
    /// DoRA's norms of the outputs.
    pub magnitude: Option<Vec<f32>>,
    /// What the sums are multiplied by, for each output: the magnitude by the norm.
    factors: Option<Vec<f32>>,
}

impl LowRank {
    /// B A, times `scale`; A is (rank, columns), B (rows, rank).
    pub fn new(a: Vec<f32>, b: Vec<f32>, [rank, columns]: [usize; 2], scale: f32) -> LowRank {
        LowRank { a, b, rank, columns, scale, transposed: false, magnitude: None, factors: None }
    }
    pub fn rank(&self) -> usize {
        self.rank
    }
    /// The factor of the product times its rank.
    pub fn alpha(&self) -> f32 {
        self.scale * self.rank as f32
    }
    /// A and B.
    pub fn factors(&self) -> (&[f32], &[f32]) {
        (&self.a, &self.b)
    }
    /// The same sums of the same products.
    pub fn has_factors_of(&self, other: &LowRank) -> bool {
        (self.rank, self.columns, self.scale) == (other.rank, other.columns, other.scale)
            && (&self.a, &self.b) == (&other.a, &other.b)
    }
    /// How many outputs DoRA scales.
    pub fn scaled(&self) -> usize {
        self.magnitude.as_ref().map_or(0, Vec::len)
    }
    /// The output that an element of the matrix belongs to.
    pub fn output(&self, at: usize) -> usize {
        if self.transposed { at % self.columns } else { at / self.columns }
    }
    /// Scales the sums of [`LowRank::add`] from now on, given the sums of squares of each output's.
    pub fn normalize(&mut self, squares: &[f64]) {
        let Some(magnitude) = &self.magnitude else { return };
        let factors = magnitude.iter().zip(squares).map(|(m, squares)| (f64::from(*m) / squares.sqrt()) as f32);
        self.factors = Some(factors.collect());
    }
    /// Adds the product's elements from `at` on to `w`, and scales the sums.
    pub fn add(&self, at: usize, w: &mut [f32]) {
        for (i, w) in w.iter_mut().enumerate() {
            let (row, column) = ((at + i) / self.columns, (at + i) % self.columns);
            let b = &self.b[row * self.rank..(row + 1) * self.rank];
            let dot: f32 = b.iter().enumerate().map(|(k, b)| b * self.a[k * self.columns + column]).sum();
            *w += self.scale * dot;
            if let Some(factors) = &self.factors {
                *w *= factors[self.output(at + i)];
            }
        }
    }
}
