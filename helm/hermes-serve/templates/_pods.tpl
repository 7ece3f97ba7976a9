{{/* Parts that pods share. */}}

{{- define "hermes.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "hermes.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* Requests, and limits of what cannot be shared: (dict "root" $ "cpus" 2 "memory" "4Gi" "gpus" 1) */}}
{{- define "hermes.resources" -}}
resources:
  requests:
    cpu: {{ .cpus | quote }}
    memory: {{ .memory }}
  limits:
    memory: {{ .memory }}
    {{- if .root.Values.cpuLimits }}
    cpu: {{ .cpus | quote }}
    {{- end }}
    {{- if .gpus }}
    {{ .root.Values.engines.gpuResource }}: {{ .gpus | quote }}
    {{- end }}
{{- end }}

{{- define "hermes.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* `scheduling` of a pod of which there is only one (the head, Redis): by default Kubernetes would leave it on a dead node
     for five minutes. */}}
{{- define "hermes.soonElsewhere" -}}
{{- $scheduling := deepCopy (. | default dict) -}}
{{- range list "unreachable" "not-ready" }}
{{- $toleration := dict "key" (print "node.kubernetes.io/" .) "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 30 }}
{{- $_ := set $scheduling "tolerations" (append ($scheduling.tolerations | default list) $toleration) }}
{{- end -}}
{{ toYaml $scheduling }}
{{- end }}
