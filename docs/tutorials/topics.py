"""Topics of documents.

A pile of texts and no labels: what are they about? Latent Dirichlet allocation describes a document by shares of
topics, and a topic by probabilities of words. `LatentDirichletAllocation` has a posterior for both, so that a short
document has wide shares.
"""

# %% [markdown]
# ## The documents
#
# To see whether the answer is right we need texts whose topics are known, so we write 600 short ones by a machine: each
# mixes four subjects in its own shares, and common words stand in all of them.

# %%
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import beta
from sklearn.feature_extraction.text import CountVectorizer

from bayesrule.estimators import LatentDirichletAllocation

rng = np.random.default_rng(0)
vocabulary = {
    "weather": "rain wind cloud storm snow sun frost fog thunder heat",
    "kitchen": "salt flour oven butter sugar knife pan onion dough pepper",
    "football": "goal team match coach penalty league striker referee pitch corner",
    "music": "chord melody rhythm piano tempo violin song choir drum scale",
}
subjects = {name: text.split() for name, text in vocabulary.items()}
common = ["day", "time", "people", "good", "new", "first", "last", "year"]
lengths = rng.integers(8, 120, 600)
true_shares = rng.dirichlet(np.full(4, 0.3), 600)


def write(length, shares):
    from_subject = rng.choice(list(subjects), size=length, p=shares)
    return " ".join(rng.choice(common) if rng.random() < 0.3 else rng.choice(subjects[name]) for name in from_subject)


texts = [write(length, shares) for length, shares in zip(lengths, true_shares, strict=True)]
print(texts[0][:100], "…")

# %% [markdown]
# ## The few lines
#
# scikit-learn counts the words. `method="svi"` takes mini-batches of documents, with a rate that falls; `method="vmp"`
# takes all of them in each step. Both are the same model and the same messages. The last 200 documents are held out.

# %%
vectorizer = CountVectorizer()
counts = vectorizer.fit_transform(texts)
words = vectorizer.get_feature_names_out()
train, test = slice(0, 400), slice(400, None)
model = LatentDirichletAllocation(4, method="svi", max_iter=20, random_state=0).fit(counts[train])
order = np.argsort(-model.components_, axis=1)[:, :8]
for topic, best in enumerate(order):
    print(f"topic {topic}:", ", ".join(words[best]))

# %% [markdown]
# ## What the result means
#
# `transform` has the expected shares of the topics in new documents, and `document_posterior` a Dirichlet distribution
# for each of them. Its width is what a point estimate does not tell: twenty words do not determine what a text is
# about. Because we know the true shares, we can ask how often they are in their 90 % intervals. Topics have no names:
# we match each to the subject whose words it has.

# %%
concentration = np.asarray(model.document_posterior(counts[test]).concentration)
total = concentration.sum(axis=1, keepdims=True)
mass = np.array([[topic[np.isin(words, listed)].sum() for listed in subjects.values()] for topic in model.components_])
subject_of = mass.argmax(axis=1)
print("topics are", ", ".join(list(subjects)[subject] for subject in subject_of))
truth = true_shares[test][:, subject_of]
low, high = (beta.ppf(level, concentration, total - concentration) for level in (0.05, 0.95))
for name, those in {"under 40 words": lengths[test] < 40, "40 and more": lengths[test] >= 40}.items():
    substantial = (truth > 0.05) & those[:, None]  # Shares of almost nothing are below any interval that has a width.
    inside = ((low <= truth) & (truth <= high))[substantial]
    width = (high - low)[substantial].mean()
    print(f"{name}: {inside.mean():.0%} of the shares are in their 90 % intervals, of mean width {width:.2f}")

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), width_ratios=[1.25, 1])
colours = ["#16508f", "#c9641a", "#3f9b6b", "#b9b9b9"]
some = np.argsort(lengths[test])[::15]
start = np.zeros(len(some))
for topic, subject in enumerate(subject_of):
    part = (concentration / total)[some, topic]
    left.barh(np.arange(len(some)), part, left=start, color=colours[topic], label=list(subjects)[subject])
    start += part
left.set(xlabel="expected share of each topic", ylabel="new documents, short to long", yticks=[], xlim=(0, 1))
left.legend(frameon=False, fontsize=9, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=0.8)
mean = concentration / total
deviation = np.sqrt(mean * (1 - mean) / (total + 1)).max(axis=1)
right.plot(lengths[test], deviation, ".", color="#16508f", markersize=4)
right.set(xlabel="words in the document", ylabel="largest standard deviation of a share")
plt.show()

# %% [markdown]
# ## What to watch out for
#
# - The intervals hold less often than they say. The approximation takes a document's shares and the topics of its words
#   as independent, and a share's posterior does not know that topics are estimated, too. Read the widths as an order:
#   which documents say much about their topics, and which do not.
# - Real texts are less tidy than these. Which words are left out (`stop_words`, `min_df`, `max_df` of the vectorizer)
#   changes topics more than the algorithm does; topics have no order, and other seeds find others.
# - The number of topics is yours: compare `perplexity` of held-out documents, or let `bayesrule fit texts.csv --model
#   topics` choose it in that way.
#
# ## Where next
#
# [Estimators](../estimators.md#unsupervised), with `partial_fit` for documents that keep coming; mixtures and factors
# in [named models](../models.md#mixtures-factor-analysis-topics); [a stream](online_stream.md).
