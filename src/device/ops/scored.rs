//! Operands of routers that choose experts by other scores than their probabilities: sigmoids, a bias that takes part
//! in the choice only, and groups of experts of which a token uses some (DeepSeek-AI 2024, "DeepSeek-V3"); and of
//! factors of experts.
use super::check::{float, read, written};
use super::experts::{Route, RouteBackward, RouteShape};
use crate::{View, ViewMut};
use flatshard_base::{DType, Error, Result};

/// How experts are scored and chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteRule {
    /// A score is the sigmoid of a logit; otherwise the logits' softmax.
    pub sigmoid: bool,
    /// The choice adds a bias to each score.
    pub biased: bool,
    /// A token's experts are from its best `top_groups` of so many groups. A group is as good as its two best experts
    /// together with sigmoids, and as its best one otherwise.
    pub groups: usize,
    pub top_groups: usize,
    /// A token's weights are multiplied by this.
    pub scale: f32,
    /// A token's experts are chosen by their logits, each with a weight of its own: its softmax among those that no
    /// earlier choice took and that are nearly as good, by up to this part of the larger logit's size (Liu et al. 2024,
    /// "GRIN: GRadient-INformed MoE"). Scores stay logits, and have no gradient of a load-balancing loss.
    pub mixer: Option<f32>,
}

impl RouteRule {
    /// Probabilities, and nothing else.
    pub const PLAIN: RouteRule =
        RouteRule { sigmoid: false, biased: false, groups: 1, top_groups: 1, scale: 1.0, mixer: None };
    /// Groups at most, of which a GPU's warp keeps one in each lane.
    pub const GROUPS: usize = 32;

    pub fn check(&self, op: &'static str, shape: &RouteShape) -> Result<()> {
        let &RouteRule { sigmoid, groups, top_groups, .. } = self;
        let each = shape.experts.checked_div(groups).unwrap_or(0);
        let groups_fit = groups <= Self::GROUPS && (1..=groups).contains(&top_groups);
        let alone = RouteRule { mixer: self.mixer, ..Self::PLAIN };
        let is_alone = self.mixer.is_none() || *self == alone && !shape.normalize;
        let fits = each * groups == shape.experts && groups_fit && is_alone;
        match fits && shape.top_k <= top_groups * each && (groups == 1 || !sigmoid || each > 1) {
            true => Ok(()),
            false => Err(Error::op(op, format!("{shape:?} with {self:?}"))),
        }
    }
}

/// Like [`Route`], with scores in place of probabilities, by `rule`.
pub struct RouteScored<'a> {
    pub rule: RouteRule,
    /// (E), if the rule has one.
    pub bias: Option<View<'a>>,
    pub route: Route<'a>,
}

impl RouteScored<'_> {
    pub const OP: &'static str = "route_scored";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        self.rule.check(Self::OP, &self.route.shape)?;
        if let Some(bias) = &self.bias {
            bias.fits(Self::OP, "bias", float(Self::OP, bias.dtype())?, self.route.shape.experts)?;
        }
        match self.bias.is_some() == self.rule.biased {
            true => self.route.check(),
            false => Err(Error::op(Self::OP, format!("bias {} with {:?}", self.bias.is_some(), self.rule))),
        }
    }
}

/// Backward of [`RouteScored`]. Assigns `dlogits`.
pub struct RouteScoredBackward<'a> {
    pub rule: RouteRule,
    pub route: RouteBackward<'a>,
}

impl RouteScoredBackward<'_> {
    pub const OP: &'static str = "route_scored_backward";
    /// Returns N.
    pub fn check(&self) -> Result<usize> {
        self.rule.check(Self::OP, &self.route.shape)?;
        self.route.check()
    }
}

/// A factor of each expert on the weights of its rows: `y[i] = factors[chosen[i]] weights[i]`. Assigns.
pub struct ScaleChosen<'a> {
    /// (N, K) u32
    pub chosen: View<'a>,
    /// (E)
    pub factors: View<'a>,
    /// (N, K) f32
    pub weights: View<'a>,
    /// (N, K) f32
    pub y: ViewMut<'a>,
}

impl ScaleChosen<'_> {
    pub const OP: &'static str = "scale_chosen";
    pub fn check(&self) -> Result<()> {
        let n = self.y.len();
        float(Self::OP, self.factors.dtype())?;
        read(Self::OP, &[("chosen", &self.chosen, DType::U32, n), ("weights", &self.weights, DType::F32, n)])?;
        written(Self::OP, &[("y", &self.y, DType::F32, n)])
    }
}

/// Backward of [`ScaleChosen`]: `dy` becomes the gradient of the weights. Adds to that of the factors.
pub struct ScaleChosenBackward<'a> {
    /// (N, K) u32
    pub chosen: View<'a>,
    /// (E)
    pub factors: View<'a>,
    /// (N, K) f32
    pub weights: View<'a>,
    /// (N, K) f32
    pub dy: ViewMut<'a>,
    /// (E) f32; none if they are frozen.
    pub dfactors: Option<ViewMut<'a>>,
}

impl ScaleChosenBackward<'_> {
    pub const OP: &'static str = "scale_chosen_backward";
    pub fn check(&self) -> Result<()> {
        let n = self.dy.len();
        float(Self::OP, self.factors.dtype())?;
        read(Self::OP, &[("chosen", &self.chosen, DType::U32, n), ("weights", &self.weights, DType::F32, n)])?;
        written(Self::OP, &[("dy", &self.dy, DType::F32, n)])?;
        let experts = self.factors.len();
        self.dfactors.as_ref().map_or(Ok(()), |d| d.fits(Self::OP, "dfactors", DType::F32, experts))
    }
}
