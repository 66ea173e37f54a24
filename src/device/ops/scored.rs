//! Operands of routers that choose experts by other scores than their probabilities: sigmoids, a bias that takes part
//! in the choice only, and groups of experts of which a token uses some (DeepSeek-AI 2024, "DeepSeek-V3").
use super::check::float;
use super::experts::{Route, RouteBackward, RouteShape};
use crate::View;
use flatshard_base::{Error, Result};

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
}

impl RouteRule {
    pub fn check(&self, op: &'static str, shape: &RouteShape) -> Result<()> {
        let &RouteRule { sigmoid, groups, top_groups, .. } = self;
        let each = shape.experts.checked_div(groups).unwrap_or(0);
        let fits = each * groups == shape.experts && (1..=groups).contains(&top_groups);
        match fits && shape.top_k <= top_groups * each && (groups == 1 || !sigmoid || each > 1) {
            true => Ok(()),
            false => Err(Error::op(op, format!("{shape:?} with {self:?}"))),
        }
    }
}

/// As [`Route`], with scores in place of probabilities, by `rule`.
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
