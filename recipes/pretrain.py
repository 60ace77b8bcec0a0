"""Learn from images without labels: masked autoencoding (arXiv 2111.06377), or a larger model's features.

    python recipes/pretrain.py --dataset_name photos --preset tiny-patch16-224 --output_dir runs/pretrained
    python recipes/train.py --dataset_name photos --model_name_or_path runs/pretrained/model --output_dir runs/photos
    python recipes/pretrain.py --config pretrain-fashion-mnist
    python recipes/pretrain.py --dataset_name photos --preset tiny-patch16-224 --teacher_name_or_path facebook/dinov2-base --output_dir runs/distilled

The first two commands belong together: what was learned from all photos is the start of a classifier of those with labels.

Data, flags, resuming, processes, run folder and exit codes are those of train.py (see its --help), without what is of labels. Images
need none: any folder of images will do. Where each image has one, an evaluation also gives the accuracy of its k nearest
neighbours by the encoder's features. model/ opens as `HFViTForPreTraining`, and as `HFViTModel`, `HFViTForImageClassification` and
`HFViTBackbone`; its card shows a few images, what the encoder sees of them, and the decoder's answer.
"""

if __name__ == "__main__":  # the imports take seconds
    from command_line import training_arguments

    from hf_vit.training.pretrain_arguments import PretrainArguments

    ARGUMENTS = training_arguments(__doc__, PretrainArguments)

    from hf_vit.training.pretraining import PreTraining
    from hf_vit.training.train import train_as_script

    train_as_script(ARGUMENTS, PreTraining)
